"""Modules of PyTorch as graphs: `ht.from_torch(module, (None, 3, 32, 32))` makes one with variables of a module.

PyTorch exports the module, and what each of its functions means is one of ours, in a table whose parameters are called
as PyTorch calls them. PyTorch itself is imported when it is called. Left out: what depends on values, packed
sequences, complex numbers.
"""

from ..answers import answer_calls as _answer_calls
from . import indexing, layers
from .load import from_torch

__all__ = ["from_torch"]

_answer_calls(__name__)
