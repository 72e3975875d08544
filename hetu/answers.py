"""What a wrong name in a public package is told, a call with arguments that do not fit, and a wrong variable.

What is right is said by the signatures alone; `arguments.py` compares values with them.

Python's own answers name neither the user's line nor a remedy.
"""

from __future__ import annotations

import functools
import inspect
import os
import reprlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

import numpy as np

from .arguments import Wrong, look, plain, plan_of
from .core.errors import ANSWERS, ArgumentError, HetuError, UnknownNameError, did_you_mean, public
from .core.graph import FUNCTIONS, Node
from .core.op import Op
from .elsewhere import remedy

INSIDE = f"{__package__}."
PACKAGE, NUMPY = Path(__file__).parent, Path(np.__file__).parent
OF_THE_CLASS = ("__init__", "forward")  # what is called by the name of its class


class _Package(ModuleType):
    """A module that answers a name it does not have: where it is, what is like it, or the nearest of its `__all__`."""

    __all__: list[str]

    def __dir__(self) -> list[str]:
        """What an editor completes to: not what a module imports for itself."""
        return [*self.__all__]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        alike = [function for function in FUNCTIONS if function.replace("_", "") == name.replace("_", "").lower()]
        where = _where(name)
        theirs = f"call the function ht.{alike[0]}" if alike else remedy(name)
        fix = (where and remedy(name)) or where or theirs or did_you_mean(name, self.__all__)
        raise UnknownNameError(f"{self.__name__} has no {name!r}", fix=fix)


def _where(name: str) -> str:
    """The remedy for a name that another package of hetu has."""
    return next((f"it is {label}.{name}" for label, module in _packages().items() if name in module.__all__), "")


@functools.cache
def _packages() -> dict[str, ModuleType]:
    """The packages of hetu, by how they are written."""
    top = sys.modules[__package__]
    found = {"ht": top} | {f"ht.{n}": inside for n in top.__all__ if inspect.ismodule(inside := getattr(top, n))}
    for label, module in [*found.items()][1:]:
        found |= {f"{label}.{n}": deep for n in module.__all__ if inspect.ismodule(deep := getattr(module, n))}
    return found


def answer_names(module: str) -> None:
    """Let a loaded module answer names that it does not have: `answer_names(__name__)`."""
    sys.modules[module].__class__ = _Package


PUBLIC = public(len).__code__  # of whatever is public  # type: ignore[attr-defined]


def answer_calls(module: str, workers: tuple[type, ...] | None = None) -> None:
    """Let the functions of a package's `__all__`, and its classes and their methods, answer calls that do not fit.

    So do the methods that a class has from bases which the package does not show.

    It stands last in the package, whose own files call each other as before. A room that works while a step runs names
    its `workers`: of those (and their kin, of tuples and of dictionaries) only what makes them answers, and what
    hetu's own files call is not looked at in such a room.
    """
    answer_names(module)
    package = sys.modules[module]
    shown = [vars(package).get(name) for name in package.__all__]
    for name in package.__all__:
        value = vars(package).get(name)  # what is not loaded yet answers for itself
        if not getattr(value, "__module__", "").startswith(module):
            continue
        if inspect.isfunction(value) and _is_open(value):
            setattr(package, name, answering := public(value))
            setattr(sys.modules[value.__module__], name, answering)  # where pickle looks for it
        elif inspect.isclass(value):
            for own in (vars(cls).get(called) for cls in value.__mro__ for called in OF_THE_CLASS):
                if inspect.isfunction(own):
                    STRANGE.discard(inspect.unwrap(own))
            if not issubclass(value, BaseException) and not getattr(value, "_is_protocol", False):
                made = issubclass(value, (tuple, dict, *(workers or ())))
                own = [value, *(b for b in value.__mro__ if b.__module__.startswith(module) and b not in shown)]
                found = [function for each in own for function in _answer_methods(each, made)]
                OUTSIDE.update(found if workers is not None or value is Node else ())  # which passes make all the time


def _answer_methods(cls: type, made: bool) -> list[Any]:
    """Those of a class, or only those by which it is `made`.

    Where a class says itself which of its methods are public, the others are left alone.
    """
    says = any(getattr(own, "__code__", None) is PUBLIC for name, own in vars(cls).items() if name not in OF_THE_CLASS)
    answering = []
    for name, own in list(vars(cls).items()):
        makes, shown = isinstance(own, classmethod | staticmethod), not name.startswith("_") or name == "__call__"
        called = name in OF_THE_CLASS or (shown and (makes or not (made or says)))
        bound = type(own) if makes else None
        function = own.__func__ if bound else own
        if called and inspect.isfunction(function) and _is_open(function):
            type.__setattr__(cls, name, bound(public(function)) if bound else public(function))
            answering.append(function)
    return answering


def _is_open(function: Any) -> bool:
    """Whether it answers nothing yet."""
    return function.__code__ is not PUBLIC


HELD: set[Any] = set()  # operators whose annotations are kept: hetu's own
# Functions whose arguments are looked at only where code outside of hetu calls them, by the module whose name Python
# keeps in each frame: a function cannot learn otherwise who calls it, and right arguments do the same either way.
OUTSIDE: set[Any] = set()
STRANGE: WeakSet[Any] = WeakSet()  # functions of classes that no package has declared by `answer_calls`


class AnswersCalls:
    """Base of classes whose `__init__`, and `forward` of a layer, are public; subclasses write theirs as ever."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in OF_THE_CLASS:
            if inspect.isfunction(own := vars(cls).get(name)):
                STRANGE.add(own)
                type.__setattr__(cls, name, public(own))


Arguments = tuple[Sequence[Any], Mapping[str, Any]]


def watch(function: Any) -> Callable[[Any, Any], Arguments]:
    """What looks at the arguments of a public function before it is called, and raises where they are wrong.

    It gives those to be called with, in which numbers of NumPy are Python's.
    """

    def look_at(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        if (found := look(function, args, kwargs)) is not None:
            raise _in_its_own_words(function, args, kwargs, found)
        return plain(function, args, kwargs)

    def look_at_operator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        op, *inputs = args
        if op not in HELD:
            return args, kwargs
        if (found := look(op, inputs, kwargs)) is not None:
            raise _in_its_own_words(op, inputs, kwargs, found)
        made, by_name = plain(op, inputs, kwargs)
        return (op, *made), by_name

    def look_from_outside(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        inside = sys._getframe(2).f_globals.get("__name__", "").startswith(INSIDE)
        return (args, kwargs) if inside else look_at(args, kwargs)

    if function.__qualname__ == "Op.__call__":
        return look_at_operator
    held = function not in STRANGE and plan_of(function, False).looks  # what others promise each other is theirs
    if not held:
        return lambda args, kwargs: (args, kwargs)
    return look_from_outside if function in OUTSIDE else look_at


ANSWERS.append(sys.modules[__name__])


def explain(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> HetuError | None:
    """What is told of a public call that failed; None where its arguments are right."""
    if not isinstance(error, OF_VALUES):
        return None
    if function.__qualname__ == "Op.__call__":
        op, *inputs = args
        found = _unusable(op, op.name, inputs, kwargs, error) if _is_inside(error) else None
        return None if found is None else ArgumentError(f"{op.name} {found.got}", fix=found.fix)
    parameters, name = list(inspect.signature(function).parameters.values()), _name(function, args)
    bound = bool(parameters) and parameters[0].name in ("self", "cls")
    cls = type(args[0]) if bound and args and function.__name__ == "__init__" else None
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:  # the function did not even begin
        return _misfit(name, cls, parameters[bound:], args[bound:], kwargs)
    if not _is_inside(error):
        return None
    told = look(function, args, kwargs, strict=True)
    if (found := told or _unusable(function, name, args[bound:], kwargs, error)) is None:
        return None
    answer = ArgumentError(f"{name} {found.got}", fix=found.fix)
    answer.__cause__ = error.with_traceback(None) if told else error  # which may be a fault of ours
    return answer


OF_VALUES = (TypeError, AttributeError, ValueError, LookupError, ArithmeticError)  # what Python says of wrong arguments


def _is_inside(error: Exception) -> bool:
    """Whether code of hetu, or of NumPy called by it, raised an error, and not what a user gave it to call."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [file for file in files if not (Path(file).is_relative_to(NUMPY) or file.endswith(".pyx"))]
    return Path(own[-1]).is_relative_to(PACKAGE)


def _unusable(
    function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> Wrong | None:
    """What is told of arguments of the right types by which a function of hetu's failed."""
    if function in STRANGE or function.__name__ in ("__getitem__", "__setitem__"):
        return None
    given = ", ".join([*map(reprlib.repr, args), *(f"{n}={reprlib.repr(v)}" for n, v in kwargs.items())])
    usage = (
        str(inspect.signature(function))
        .replace("(self, ", "(")
        .replace("(self)", "()")
        .replace("'", "")
        .split(" -> ")[0]
    )
    return Wrong(f"cannot use ({given}): {type(error).__name__}: {error}", f"pass what it takes: {name}{usage}")


def _in_its_own_words(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Wrong) -> HetuError:
    """The error of a wrong argument; that of the function itself, which knows more, where it changes nothing."""
    try:
        if found.large:
            pass
        elif isinstance(function, Op):
            function.make(*function._arguments(tuple(args), dict(kwargs)))
        elif (
            function.__name__ in OF_THE_CLASS
            or function.__name__[0].isupper()  # it makes an object, as a class does
            or "Node" in str(made := function.__annotations__.get("return"))
            or made == function.__qualname__.rpartition(".")[0]  # of its own class
        ):
            function(*args, **kwargs)
    except HetuError as error:
        if error.fix and not error.message.endswith(found.got):  # the same, of a function that it called
            return error.with_traceback(None)
    except Exception:  # it has no words for it
        pass
    return ArgumentError(f"{_name(function, args)} {found.got}", fix=found.fix)


def _name(function: Any, args: Sequence[Any]) -> str:
    """What a user calls a function by: the class, for what belongs to it."""
    name = str(function.__name__)
    return type(args[0]).__name__ if name in OF_THE_CLASS and args else name


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
            fix = did_you_mean(option, known) or "leave it out: it takes nothing by name"
            return ArgumentError(f"{name} takes no {option!r}", fix=fix)
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
