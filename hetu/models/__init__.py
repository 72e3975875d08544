"""Models, a file a family: functions from the nodes of their inputs to those of their outputs, made of public parts.

Each says where it comes from; what trains them is in `examples/`.
"""

from ..answers import answer_names as _answer_names
from . import clicks, experts, graphs, knowledge, text, vision

__all__ = ["clicks", "experts", "graphs", "knowledge", "text", "vision"]
_answer_names(__name__)
