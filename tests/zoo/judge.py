"""What becomes of a wrong call: a typed error that teaches, one that is right for a reason, or what is left."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import math
import signal
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

import hetu as ht
from hetu import arguments, ranges
from hetu.core.graph import topological
from hetu.core.op import Role
from hetu.core.types import Dim

from .calls import Call
from .reasons import RAW, RIGHT, Row
from .wrong import names_of

INSIDE = str(Path(ht.__file__).parent)
MOST = 10**7  # elements of the values of a graph that is run
PATIENCE = 1.0  # seconds of the processor that a call may take, after which it counts as endless


class Endless(BaseException):
    """A call that does not end."""


@contextlib.contextmanager
def patience() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Endless

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def verdict(call: Call, argument: str, kind: str) -> str:
    """ "told", a reason why it is right, or "left: " and what is wrong with the answer."""
    nowhere = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"), nowhere[0], nowhere[1], patience():
            warnings.simplefilter("ignore")
            made = call.target.function(*call.args, **call.named)
            if inspect.isgenerator(made):
                made = next(made, None)
            elif isinstance(made, contextlib.AbstractContextManager) and hasattr(made, "gen"):
                with made as made:
                    pass
            reason = why(call, argument, kind, made)
            return reason or f"left: made {type(made).__name__}"
    except ht.errors.HetuError as error:
        where = error.site.code.co_filename if error.site else ""
        if where and not where.startswith(INSIDE) and error.fix:
            return "told"
        return f"left: {type(error).__name__} without {'a remedy' if where else 'the line'}: {error.message}"
    except (SystemExit, argparse.ArgumentTypeError):  # which argparse explains
        return "told"
    except (Exception, Endless) as error:
        return known(call, argument, kind, RAW) or f"left: {type(error).__name__}: {error}"


def why(call: Call, argument: str, kind: str, made: Any) -> str:
    """The reason why a call that looks wrong is right; empty if there is none."""
    if kind == "twice":
        return "asked again"
    if kind == "missing":
        return "has a default"
    wanted = declared(call, argument)
    if kind == "kind: none" and wanted is not None and wanted.check(None):
        return "optional"
    if kind in NUMBERS and wanted is not None and bounded(wanted.hint) and wanted.check(given(call, argument)):
        return "in its range"
    return known(call, argument, kind, RIGHT | RAW) or ("computes" if computes(made) else "")


NUMBERS = ("sign", "nan", "dtype: fraction", "kind: number", "range: zero", "range: huge", "range: infinite")


def given(call: Call, argument: str) -> Any:
    """What a call passes for an argument."""
    names = names_of(call)
    return call.args[names.index(argument)] if argument in names else call.named[argument]


def known(call: Call, argument: str, kind: str, reasons: Mapping[str, list[Row]]) -> str:
    """The reason that a table gives."""
    for reason, rows in reasons.items():
        for label, name, kinds in rows:
            if fnmatch(call.target.label, label) and fnmatch(argument, name) and fnmatch(kind, kinds):
                return reason
    return ""


def declared(call: Call, argument: str) -> Any:
    """What a function says that it takes for an argument; None where it says nothing."""
    function = call.target.function
    plan = arguments.plan_of(function.__init__ if inspect.isclass(function) else function, False)
    return plan.named.get(argument, plan.others)


def bounded(hint: Any) -> bool:
    """Whether a type says which numbers are meant."""
    extras = getattr(hint, "__metadata__", ())
    inside = [each for each in getattr(hint, "__args__", ()) if not isinstance(each, list)]
    return any(each is ranges.ANY or isinstance(each, ranges.Range | range) for each in extras) or any(
        map(bounded, inside)
    )


def flat(made: Any) -> list[Any]:
    """What a call made, one by one."""
    inside = made.values() if isinstance(made, dict) else made if isinstance(made, tuple | list) else None
    return [made] if inside is None else [one for each in inside for one in flat(each)]


def computes(made: Any) -> bool:
    """Whether what was made are nodes that can be run, and give the types that they say."""
    nodes = flat(made)
    if not nodes or not all(isinstance(node, ht.Node) and not isinstance(node.type, tuple) for node in nodes):
        return False
    if sum(math.prod(_sizes(n)) for n in topological(nodes) if not isinstance(n.type, tuple)) > MOST:
        return True  # too large to run here
    feed = {n: _ones(n) for n in topological(nodes) if n.role is Role.PLACEHOLDER}
    try:
        values = ht.evaluate(nodes if len(nodes) > 1 else [*nodes, *nodes], feed)
    except ht.errors.HetuError as error:
        return bool(error.fix)  # by the values that it was fed
    return all(_fits(np.asarray(value), node) for value, node in zip(values, nodes))


def _ones(node: ht.Node) -> np.ndarray:
    return np.ones(_sizes(node), node.dtype)


def _sizes(node: ht.Node) -> list[int]:
    return [2 if isinstance(s, Dim) else s for s in node.shape]


def _fits(value: np.ndarray, node: ht.Node) -> bool:
    sizes = zip(value.shape, node.shape)
    return value.dtype == node.dtype and value.ndim == node.ndim and all(isinstance(s, Dim) or n == s for n, s in sizes)
