"""Modules of PyTorch as graphs: `ht.from_torch(module, (None, 3, 32, 32))` makes one with variables of a module.

PyTorch traces the module, and what each function means is one of ours, in a table whose signatures say what is read.
PyTorch itself is imported when it is called. Left out: what depends on values, packed sequences, complex numbers.
"""

from ..answers import answer_calls as _answer_calls
from . import functions, layers
from .load import from_torch

__all__ = ["from_torch"]

_answer_calls(__name__)
