"""How long instructions and messages take: measured, fitted, or from a table."""
