"""Models, a file a family: functions from the nodes of their inputs to those of their outputs, made of public parts.

Each says where it comes from; what trains them is in `examples/`.
"""

from ..answers import answer_calls as _answer_calls
from . import bert, clicks, experts, gpt2, graphs, knowledge, llama, text, translation, vision, vit, wide

__all__ = [
    "bert", "clicks", "experts", "gpt2", "graphs", "knowledge", "llama", "text", "translation",
    "vision", "vit", "wide",
]  # fmt: skip

_answer_calls(__name__)
