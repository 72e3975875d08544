"""How a CPU computes fast what operators mean: in C where there is a compiler, by BLAS, and in few calls of NumPy.

Nobody needs this room in order to understand hetu, and everything runs without it. A recipe (a file) has what binds its
operators to arrays, found by the operator itself, and, where it joins several, the operators they become and the pass
that finds them. Each says what it gains over NumPy and forward functions, at typical sizes and in the processor time
of one thread, as `examples/benchmarks/recipes.py` measures it, and how to switch it off; `HETU_KERNELS=0` switches off
all at once, `HETU_CC=0` what is written in C: what `compiler.py` finds compiles it, and `compiled.py` keeps it. Options
at the end of a command (`HETU_CC="cc -O1 -g"`) count more than hetu's own.
"""

from __future__ import annotations

from .recipes import KERNELS

__all__ = ["KERNELS"]
