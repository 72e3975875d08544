"""`heturun`: ranks and servers started, watched, and ended together."""
