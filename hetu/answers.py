"""What a name that does not exist in a public package is told, and a call of a layer or optimizer that does not fit.

Python's own answers name neither the user's line nor a remedy.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from .core.errors import ArgumentError, HetuError, UnknownNameError, did_you_mean
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
    """Base of classes whose `__init__` answers arguments that do not fit it; subclasses write theirs as ever."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            type.__setattr__(cls, "__init__", _answering(vars(cls)["__init__"]))


def _answering(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def call(self: object, *args: Any, **kwargs: Any) -> None:
        try:
            return init(self, *args, **kwargs)
        except TypeError as error:
            within = error.__traceback__ is not None and error.__traceback__.tb_next  # a frame of `init` or below
            if within or isinstance(error, HetuError):
                raise
        raise _answer(type(self), init, args, kwargs)

    return call


def _answer(cls: type, init: Callable[..., None], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ArgumentError:
    """The error of a call whose arguments `init` does not take."""
    parameters = list(inspect.signature(init).parameters.values())[1:]
    places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if len(args) > len(places):
        message = f"{cls.__name__} takes {len(places)} by position ({', '.join(places)}), got {len(args)}"
        pairs = [f"{name}={value!r}" for name, value in zip(named, args[len(places) :])]
        return ArgumentError(message, fix=f"name the others: {', '.join(pairs)}" if pairs else "leave the others out")
    for name in kwargs:
        if name in places[: len(args)]:
            return ArgumentError(f"{cls.__name__} got {name!r} twice", fix="pass it once")
        if name not in places + named:
            return ArgumentError(f"{cls.__name__} takes no {name!r}", fix=did_you_mean(name, _names(cls)))
    missing = [p.name for p in parameters if p.default is p.empty and p.name in {*places[len(args) :], *named}]
    wanted = ", ".join(f"{name}=..." for name in missing if name not in kwargs)
    return ArgumentError(f"{cls.__name__} misses {wanted.replace('=...', '')}", fix=f"pass {wanted}")


def _names(cls: type) -> set[str]:
    """What the constructors of a class and of its bases take by name."""
    inits = [inspect.signature(vars(base)["__init__"]) for base in cls.__mro__[:-1] if "__init__" in vars(base)]
    found = [p for signature in inits for p in list(signature.parameters.values())[1:]]
    return {p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
