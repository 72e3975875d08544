"""The table of meanings: what an operator of ONNX is made of ours, declared by the signature of a function.

Positional parameters are the operator's inputs (None where one is left out), keyword-only ones its attributes, with
ONNX's defaults. A parameter is annotated where a node is not what the function wants.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
KnownArray = Any  # an array, known when the graph is built: it decides shapes, or how something is computed
DType = Any  # an attribute that is a dtype, for which ONNX has a number
Exact = Any  # a node whose dtype is the one in the file: it says how something is rounded
Untrained = Any  # a node that no optimizer changes
Slide = Any  # of `**slide`: all attributes that say how a window slides
OutputCount = Any  # instead of an attribute: how many outputs are asked for

SLIDES = {"auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides"}
MEANINGS: dict[str, Meaning] = {}


@dataclass(frozen=True)
class Meaning:
    """A function of nodes, and what its signature says.

    >>> from hetu.onnx.meaning import MEANINGS
    >>> MEANINGS["Reshape"].inputs, MEANINGS["Reshape"].kind(1)
    (('data', 'shape'), 'KnownArray')
    """

    function: Callable[..., Any]
    signature: inspect.Signature
    known: int | None = None  # the first input of those that are known arrays, without a word of the signature

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return self.signature.parameters

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(name for name, p in self.parameters.items() if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD))

    @property
    def attributes(self) -> set[str]:
        own = {
            name for name, p in self.parameters.items() if p.kind is p.KEYWORD_ONLY and p.annotation != "OutputCount"
        }
        return own | (SLIDES if any(p.annotation == "Slide" for p in self.parameters.values()) else set())

    def kind(self, position: int) -> str:
        """The annotation of an input. Behind the last stand more of its kind, or none."""
        names = self.inputs
        if self.known is not None and position >= self.known:
            return "KnownArray"
        return str(self.parameters[names[min(position, len(names) - 1)]].annotation) if names else ""

    def is_dtype(self, attribute: str) -> bool:
        return attribute in self.parameters and self.parameters[attribute].annotation == "DType"

    def holds(self, count: int) -> bool:
        """Whether it takes so many inputs."""
        variadic = any(p.kind is p.VAR_POSITIONAL for p in self.parameters.values())
        return variadic or count <= len(self.inputs)

    def count(self) -> str | None:
        """The name of the parameter that is told how many outputs are asked for."""
        return next((name for name, p in self.parameters.items() if p.annotation == "OutputCount"), None)


def meaning(*names: str) -> Callable[[F], F]:
    """Enter a function as what operators of ONNX mean."""

    def enter(function: F) -> F:
        made = Meaning(function, inspect.signature(function))
        MEANINGS.update(dict.fromkeys(names, made))
        return function

    return enter


def meanings(table: Mapping[str, Callable[..., Any]], known: int | None = None) -> None:
    """Enter a table of operators that are one of ours, or a line of them; inputs from `known` on are known arrays."""
    MEANINGS.update({name: Meaning(made, inspect.signature(made), known) for name, made in table.items()})
