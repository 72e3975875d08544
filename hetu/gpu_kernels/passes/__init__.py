"""Passes for GPUs and the operators that only these make; `launchers.py` has their order."""
