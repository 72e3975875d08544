"""What a name that does not exist in a public package is told, and a call with arguments that do not fit.

Python's own answers name neither the user's line nor a remedy.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from .core.errors import MISFITS, ArgumentError, UnknownNameError, did_you_mean, public
from .core.graph import FUNCTIONS


class _Package(ModuleType):
    """A module that answers a name it does not have with the nearest of its `__all__`, or the function of that name."""

    __all__: list[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        alike = [function for function in FUNCTIONS if function.replace("_", "") == name.replace("_", "").lower()]
        fix = f"call the function ht.{alike[0]}" if alike else did_you_mean(name, self.__all__)
        raise UnknownNameError(f"{self.__name__} has no {name!r}", fix=fix)


def answer_names(module: str) -> None:
    """Let a loaded module answer names that it does not have: `answer_names(__name__)`."""
    sys.modules[module].__class__ = _Package


class AnswersCalls:
    """Base of classes whose `__init__` is public; subclasses write theirs as ever."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            type.__setattr__(cls, "__init__", public(vars(cls)["__init__"]))


def _misfit(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentError:
    """The error of a call whose arguments a public function does not take."""
    parameters, name = list(inspect.signature(function).parameters.values()), function.__name__
    known = {p.name for p in parameters}
    if parameters and parameters[0].name == "self":
        if name == "__init__":
            name, known = type(args[0]).__name__, _names(type(args[0]))
        parameters, args = parameters[1:], args[1:]
    places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if len(args) > len(places):
        message = f"{name} takes {len(places)} by position ({', '.join(places)}), got {len(args)}"
        pairs = [f"{option}={value!r}" for option, value in zip(named, args[len(places) :])]
        return ArgumentError(message, fix=f"name the others: {', '.join(pairs)}" if pairs else "leave the others out")
    for option in kwargs:
        if option in places[: len(args)]:
            return ArgumentError(f"{name} got {option!r} twice", fix="pass it once")
        if option not in places + named:
            return ArgumentError(f"{name} takes no {option!r}", fix=did_you_mean(option, known))
    missing = [p.name for p in parameters if p.default is p.empty and p.name in {*places[len(args) :], *named}]
    wanted = ", ".join(f"{option}=..." for option in missing if option not in kwargs)
    return ArgumentError(f"{name} misses {wanted.replace('=...', '')}", fix=f"pass {wanted}")


MISFITS.append(_misfit)


def _names(cls: type) -> set[str]:
    """What the constructors of a class and of its bases take by name."""
    inits = [inspect.signature(vars(base)["__init__"]) for base in cls.__mro__[:-1] if "__init__" in vars(base)]
    found = [p for signature in inits for p in list(signature.parameters.values())[1:]]
    return {p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
