"""The book: from an expression to the arithmetic of a training step. `hetu/README.md` gives the order to read it in."""
