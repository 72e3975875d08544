"""Fused groups: one form for every device, see `form.py`, and how a graph is divided into groups, see `group.py`."""
