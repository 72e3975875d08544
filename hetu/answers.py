"""What a name that does not exist in a public package is told, and a call with arguments that do not fit.

Python's own answers name neither the user's line nor a remedy.
"""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from .core.errors import MISFITS, ArgumentError, UnknownNameError, did_you_mean, public
from .core.graph import FUNCTIONS

OF_THE_CLASS = ("__init__", "forward")  # what is called by the name of its class


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
    """Base of classes whose `__init__`, and `forward` of a layer, are public; subclasses write theirs as ever."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in OF_THE_CLASS:
            if inspect.isfunction(own := vars(cls).get(name)):
                type.__setattr__(cls, name, public(own))


def _misfit(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentError:
    """The error of a call whose arguments a public function does not take."""
    parameters, name, cls = list(inspect.signature(function).parameters.values()), function.__name__, None
    if args and (name == "__init__" or parameters[0].name == "self"):
        cls = type(args[0]) if name == "__init__" else None
        name = type(args[0]).__name__ if name in OF_THE_CLASS else name
        parameters, args = parameters[1:], args[1:]
    kinds, taken = {p.kind for p in parameters}, _named(parameters)
    places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(args) > len(places) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        message = f"{name} takes {len(places)} by position ({', '.join(places)}), got {len(args)}"
        others = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        pairs = [f"{option}={reprlib.repr(value)}" for option, value in zip(others, args[len(places) :])]
        return ArgumentError(message, fix=f"name the others: {', '.join(pairs)}" if pairs else "leave the others out")
    for option in kwargs:
        if option in places[: len(args)]:
            return ArgumentError(f"{name} got {option!r} twice", fix="pass it once")
        if option not in taken and inspect.Parameter.VAR_KEYWORD not in kinds:
            known = taken if cls is None else _handed_on(cls)
            return ArgumentError(f"{name} takes no {option!r}", fix=did_you_mean(option, known))
    wanted = {*places[len(args) :], *taken} - {*places[: len(args)], *kwargs}
    missing = [p.name for p in parameters if p.default is p.empty and p.name in wanted]
    return ArgumentError(f"{name} misses {', '.join(missing)}", fix=f"pass {', '.join(f'{m}=...' for m in missing)}")


MISFITS.append(_misfit)


def _named(parameters: Sequence[inspect.Parameter]) -> set[str]:
    """What can be passed by name."""
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _handed_on(cls: type) -> set[str]:
    """What the constructor of a class takes by name, and those of its bases as far as it hands on what it is given."""
    found: set[str] = set()
    for init in (vars(base)["__init__"] for base in cls.__mro__[:-1] if "__init__" in vars(base)):
        parameters = list(inspect.signature(init).parameters.values())
        found |= _named(parameters[1:])
        if parameters[-1].kind is not inspect.Parameter.VAR_KEYWORD:
            break
    return found
