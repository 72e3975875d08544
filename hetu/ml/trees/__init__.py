"""How trees are grown: columns in bins and sums of whole numbers, the grower, and trees that are grown."""
