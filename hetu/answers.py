"""What a wrong name in a public package is told, a call with arguments that do not fit, and a wrong variable.

Python's own answers name neither the user's line nor a remedy.
"""

from __future__ import annotations

import inspect
import os
import reprlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from .core.errors import MISFITS, ArgumentError, UnknownNameError, did_you_mean, public
from .core.graph import FUNCTIONS, Node
from .core.types import Dim

PACKAGE, NUMPY = Path(__file__).parent, Path(np.__file__).parent
OURS = {"Dim": Dim, "Node": Node}  # what annotations may name before it is there
OF_THE_CLASS = ("__init__", "forward")  # what is called by the name of its class


class _Package(ModuleType):
    """A module that answers a name it does not have with the nearest of its `__all__`, or the function of that name."""

    __all__: list[str]

    def __dir__(self) -> list[str]:
        """What an editor completes to: not what a module imports for itself."""
        return [*self.__all__]

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


def _answer(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> ArgumentError | None:
    """What is told of a public call that failed by its arguments, or None where they are not the reason."""
    parameters, name, cls = list(inspect.signature(function).parameters.values()), function.__name__, None
    bound = bool(parameters) and (name == "__init__" or parameters[0].name == "self")
    if bound and args:
        cls = type(args[0]) if name == "__init__" else None
        name = type(args[0]).__name__ if name in OF_THE_CLASS else name
    trace = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if len(trace) == 1:  # the function did not even begin
        return _misfit(name, cls, parameters[bound:], args[bound:], kwargs) if isinstance(error, TypeError) else None
    ours = [file for file in trace if not Path(file).is_relative_to(NUMPY)]  # what we have asked NumPy for is ours
    return _mistyped(function, name, args, kwargs, error) if Path(ours[-1]).is_relative_to(PACKAGE) else None


MISFITS.append(_answer)


def _mistyped(
    function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> ArgumentError | None:
    """The error of a call one of whose arguments is not of the type that the function says."""
    signature = inspect.signature(function)
    for option, value in signature.bind(*args, **kwargs).arguments.items():
        wanted = signature.parameters[option]
        if wanted.annotation is wanted.empty or wanted.kind in (wanted.VAR_POSITIONAL, wanted.VAR_KEYWORD):
            continue
        said = SimpleNamespace(__annotations__={option: wanted.annotation})
        with suppress(NameError, TypeError):  # of types that only a type checker knows
            if not _is(value, get_type_hints(said, function.__globals__, OURS)[option]):
                fix = f"pass {option} as {wanted.annotation}"
                found = ArgumentError(f"{name} got {option}={reprlib.repr(value)}", fix=fix)
                found.__cause__ = error.with_traceback(None)
                return found
    return None


def _is(value: Any, wanted: Any) -> bool:
    """Whether a value is of a type, as far as can be told of a value."""
    origin = get_origin(wanted) or wanted
    if origin in (Union, UnionType):
        return any(_is(value, each) for each in get_args(wanted))
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(wanted))
    wider = {float: (float, int, np.number), int: (int, np.integer), None: (type(None),)}.get(origin, (origin,))
    return not all(isinstance(each, type) for each in wider) or isinstance(value, wider)


def _misfit(
    name: str, cls: type | None, parameters: Sequence[inspect.Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ArgumentError:
    """The error of a call whose arguments a public function does not take."""
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


LONGEST = 1e9  # seconds that a wait may take, as locks take no infinite ones


def seconds(variable: str, otherwise: float) -> float:
    """The number of seconds that an environment variable gives.

    >>> seconds("NO_SUCH_VARIABLE", 300.0)
    300.0
    """
    text = os.environ.get(variable)
    try:
        found = otherwise if text is None else float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= LONGEST:
        raise ArgumentError(f"{variable} is {text!r:.80}", fix="give seconds, a number above 0 such as 600")
    return found
