"""Models from elsewhere, and for elsewhere, as files of ONNX (extra `onnx`).

`ht.onnx.load(path)` makes a graph with variables of a file, `ht.onnx.save(path, outputs, state)` a file of a graph.

What an operator of ONNX means is a function, in the file of its family; those that ONNX itself defines by others, and
that need no function here, are read as it says. Control flow is followed while the graph is built, so it must be known
then. Numbers of fewer bits than ours have are kept in wider ones. Left out: results that are rounded to such numbers,
sequences, optionals, strings.
"""

from ..answers import answer_calls as _answer_calls
from . import arithmetic, images, indexing, layers
from .load import load
from .save import save

__all__ = ["load", "save"]

_answer_calls(__name__)
