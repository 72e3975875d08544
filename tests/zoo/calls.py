"""Every public callable, and calls of it that are right: those of the examples in its docstring and in the samples.

Nothing is listed here. The names come from `__all__` of hetu and its packages, the arguments from running the example
that each docstring must have, while the interpreter tells which functions are entered with what. What an example
doesn't call is looked for in that of its package, operators also in `tests/samples`.
"""

from __future__ import annotations

import doctest
import functools
import inspect
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy as np

import hetu as ht
from hetu.core.op import Op

from ..samples import SAMPLES


@dataclass(frozen=True)
class Target:
    """A public callable: its label, what is called, the code that its call enters, and whether that takes `self`."""

    label: str
    function: Callable[..., Any]
    owner: Any  # whose docstring has the example
    method: str = ""  # the name, where it is called on an object


@dataclass(frozen=True)
class Call:
    """A right call: by position, by name, and the object that it is a method of."""

    target: Target
    args: tuple[Any, ...]
    named: dict[str, Any]


def packages() -> dict[str, ModuleType]:
    """hetu and its public packages, by the name that a user writes."""
    inside = {f"ht.{n}": value for n in ht.__all__ if inspect.ismodule(value := getattr(ht, n))}
    deeper = {
        f"{label}.{n}": value
        for label, module in inside.items()
        for n in module.__all__
        if inspect.ismodule(value := getattr(module, n))
    }
    return {"ht": ht} | inside | deeper


def targets() -> dict[str, Target]:
    """Every public callable and the public methods of every public class, by label."""
    found: dict[str, Target] = {}
    shown = {each for m in packages().values() for n in m.__all__ if inspect.isclass(each := getattr(m, n))}
    for package, module in packages().items():
        for name in module.__all__:
            value = getattr(module, name)
            if not callable(value) or any(value is t.function for t in found.values()):
                continue
            label = f"{package}.{name}"
            found[label] = Target(label, value, value)
            for method, own in _members(value, shown) if inspect.isclass(value) else ():
                if (method == "__call__" or not method.startswith("_")) and _is_method(own):
                    found[f"{label}.{method}"] = Target(f"{label}.{method}", getattr(value, method), value, method)
    return found


def _members(cls: type, shown: set[Any]) -> list[tuple[str, Any]]:
    """What a class has, also from bases of hetu that no package shows; the first of a name counts."""
    bases = [b for b in cls.__mro__[1:] if b.__module__.startswith(ht.__name__) and b not in shown]
    found = {name: own for each in (*bases[::-1], cls) for name, own in vars(each).items()}
    return [(name, own) for name, own in found.items() if inspect.getattr_static(cls, name) is own]


def _is_method(own: Any) -> bool:
    return inspect.isfunction(own) or isinstance(own, classmethod | staticmethod)


def entered(target: Target) -> CodeType | None:
    """The code that a call of it enters; None for operators, and for what is not written in Python."""
    function = target.function.__init__ if inspect.isclass(target.function) else target.function
    return getattr(inspect.unwrap(function), "__code__", None)


MEMO = type(functools.lru_cache(len))


def forget() -> None:
    """Without what bounded memos hold, an example enters what it enters in a new process."""
    for module in [module for name, module in sys.modules.items() if name.startswith(f"{ht.__name__}.")]:
        for value in vars(module).values():
            if isinstance(value, MEMO) and value.cache_parameters()["maxsize"]:
                value.cache_clear()


class Recorder:
    """Runs examples and keeps the first calls of each target that they make."""

    def __init__(self, found: dict[str, Target], most: int = 2) -> None:
        self.codes = {code: t for t in found.values() if (code := entered(t))}
        self.classes = {t.function: t for t in found.values() if inspect.isclass(t.function)}
        self.methods = {(t.owner, t.method): t for t in found.values() if t.method}
        self.ops = {t.function.name: t for t in found.values() if isinstance(t.function, Op)}
        self.calls: dict[str, list[Call]] = {}
        self.most = most

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if frame.f_code is inspect.unwrap(Op.__call__).__code__:
            if target := self.ops.get(frame.f_locals["self"].name):
                self.keep(target, tuple(frame.f_locals["args"]), dict(frame.f_locals["attrs"]))
        elif target := self.codes.get(frame.f_code):
            if inspect.isclass(target.function):  # many share the `__init__` of their base
                target = self.classes.get(type(frame.f_locals["self"]))
            elif alike := self.methods.get((type(frame.f_locals.get("self")), target.method)):  # and methods
                target = alike if entered(alike) is frame.f_code else target
            if target is not None and entered(target) is frame.f_code:  # and not that of a base, by `super()`
                self.keep(target, *self.given(target, frame))

    def given(self, target: Target, frame: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]]:
        code, values = frame.f_code, frame.f_locals
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        args = [values[n] for n in names[: code.co_argcount]]
        named = {n: values[n] for n in names[code.co_argcount :]}
        rest = code.co_varnames[len(names) :]
        if code.co_flags & inspect.CO_VARARGS:
            args, rest = args + list(values[rest[0]]), rest[1:]
        if code.co_flags & inspect.CO_VARKEYWORDS:
            named |= values[rest[0]]
        own = inspect.isclass(target.function) or isinstance(
            inspect.getattr_static(target.owner, target.method or "__init__"), classmethod
        )
        return tuple(args[own:]), named

    def keep(self, target: Target, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        kept = self.calls.setdefault(target.label, [])
        if len(kept) < self.most:
            kept.append(Call(target, args, named))

    def sample(self, name: str) -> None:
        """Build the samples of an operator."""
        for sample in (each for each in SAMPLES if each.op == name):
            arrays = [a.astype(np.float32) if a.dtype.kind == "f" else a for a in sample.arrays()]
            nodes = [ht.placeholder(f"x{k}", a.shape, str(a.dtype)) for k, a in enumerate(arrays)]
            sys.setprofile(self)
            try:
                sample.build(*nodes)
            finally:
                sys.setprofile(None)

    def run(self, owner: Any) -> None:
        """Run the example in the docstring of `owner`."""
        module = owner if inspect.ismodule(owner) else sys.modules[owner.__module__]
        text = inspect.getdoc(owner) or ""
        test = doctest.DocTestParser().get_doctest(text, dict(vars(module)), module.__name__, None, 0)
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        forget()
        sys.setprofile(self)
        try:
            runner.run(test, out=io.StringIO().write, clear_globs=False)
        finally:
            sys.setprofile(None)


def owners(found: dict[str, Target]) -> dict[str, list[Target]]:
    """The targets of each function or class, by its label."""
    grouped: dict[str, list[Target]] = {}
    for target in found.values():
        grouped.setdefault(
            target.label.removesuffix(f".{target.method}") if target.method else target.label, []
        ).append(target)
    return grouped


# Their examples start or are servers, for whose answers a mistaken call would wait.
PROCESSES = {
    f"ht.ps.{name}"
    for name in (
        "Client",
        "CachedTable",
        "ServerProcess",
        "ParameterStore",
        "Controller",
        "map_elements",
        "sum_elements",
    )
}


def calls_of(owner: list[Target], found: dict[str, Target]) -> list[Call]:
    """Right calls of a function, or of a class and its methods; what its example does not call, its package's may."""
    recorder, label = Recorder(found), owner[0].label
    if label not in PROCESSES:
        recorder.run(owner[0].owner)
        if any(target.label not in recorder.calls for target in owner):
            recorder.run(packages()[label.rpartition(".")[0]])
    if isinstance(owner[0].function, Op):
        recorder.sample(owner[0].function.name)
    return [call for target in owner for call in recorder.calls.get(target.label, [])]
