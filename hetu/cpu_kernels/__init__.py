"""How a CPU computes fast what operators mean: by BLAS, in blocks that fit the cache, in lanes side by side.

Nobody needs this room in order to understand hetu, and everything runs without it. A recipe (a file) has what binds its
operators to arrays (found by the operator itself) and, where it joins several, the operators they become and
the pass that finds them. Each says what it gains, as `examples/benchmarks/recipes.py` measures it, and how to switch it off; all at once are off with `HETU_KERNELS=0`.
Gains over NumPy and forward functions are those of typical sizes in processor time, measured with one thread.
"""

from __future__ import annotations

from .recipes import KERNELS

__all__ = ["KERNELS"]
