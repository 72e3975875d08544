"""Where what is learned is kept: strategies that join the ranks of `hetu.dist` and the servers of `hetu.ps`.

Ignored on purpose: searching for the best parallel strategy.
"""

from .hybrid import Choice, Hybrid

__all__ = ["Choice", "Hybrid"]
