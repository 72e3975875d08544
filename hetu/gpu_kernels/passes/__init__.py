"""Passes for GPUs and the operators that only these make; `room.py` has their order."""
