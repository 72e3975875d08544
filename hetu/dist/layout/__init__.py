"""How a tensor lies on ranks: layouts, the rules that carry them through a graph, and moving between them."""
