"""Which plans to try: decision trees, exact elimination, stage cuts, and random walks."""
