"""Where the first NaN comes from: `ht.debug_nans` watches steps, and repeats one that makes a NaN call by call."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from ..core.backend import aligned_empty, to_numpy
from ..core.errors import NumericError, public
from ..core.executor import Executor, stepping
from ..core.op import Role
from ..core.passes import is_last
from ..core.program import Program
from ..core.subgraph import Feed, SubGraph

Guarded = list[tuple[Any, Any]]  # room for the value of a variable before the step, and the variable
_guards: weakref.WeakKeyDictionary[Program, tuple[Guarded, list[Any]]] = weakref.WeakKeyDictionary()
_rooms: weakref.WeakKeyDictionary[Executor, dict[str, Any]] = weakref.WeakKeyDictionary()


def no_number(loss: float, epoch: int, step: int) -> NumericError:
    """What is told of a loss that is NaN or infinite."""
    said = f"the loss is {'NaN' if math.isnan(loss) else 'infinite'} in epoch {epoch}, step {step}"
    if math.isnan(loss):
        return NumericError(said, fix="find the node that made it: with ht.debug_nans(): ht.fit(...)")
    return NumericError(said, fix="lower the learning rate, or clip gradients: ht.optim.SGD(..., clip_norm=1.0)")


@public
def debug_nans(on: bool = True) -> AbstractContextManager[None]:
    """Inside, a step that makes a NaN raises NumericError naming the first node that made one; no update is kept.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", ())
    >>> with ht.debug_nans():
    ...     ht.Executor([ht.log(x)]).run({x: -1.0})  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    hetu.core.errors.NumericError: <log f32[] at ...> made the first NaN; its inputs are ...
    """
    return stepping(_watched) if on else stepping()


def _watched(executor: Executor, sub: SubGraph, feed: Feed | None, program: Program) -> list[np.ndarray]:
    def careful() -> Program:
        values = sub.match(feed or {})
        made = apart(executor, sub, values)
        executor.quiet.run(executor.fill, made, values)
        return made

    return watched(executor, program, partial(executor.quiet.run, program.run), careful)


def watched(
    executor: Executor, program: Program, run: Callable[[], list[np.ndarray]], careful: Callable[[], Program]
) -> list[np.ndarray]:
    """Run; if a value that is kept holds a NaN, put the variables back and look for the node that made it.

    `careful` gives the program that is looked into, with its feeds.
    """
    saved, kept = _guards.get(program) or _guard(executor, program)
    for copy, array in saved:
        program.xp.copyto(copy, array)
    try:
        results = run()
        if _any_nan(np, results) or _any_nan(program.xp, kept):
            _put_back(executor, saved)
            executor.quiet.run(find_nan, careful())
            results = run()  # no node made it: it stood in a variable before
    except BaseException:
        _put_back(executor, saved)
        raise
    return results


def apart(executor: Executor, sub: SubGraph, values: Mapping[str, np.ndarray]) -> Program:
    """The program without donation and without the last passes, into whose operators nobody sees."""
    passes = executor.passes
    try:
        executor.passes = [run for run in passes if not is_last(run)]
        return executor.compiled(sub, values, donate=False)
    finally:
        executor.passes = passes


def _guard(executor: Executor, program: Program) -> tuple[Guarded, list[Any]]:
    """Room for the variables that a program writes, and those to watch. Optimizer state (`w/adam_m`) is not watched: a
    NaN in it reaches its variable in the same step."""
    written = {v.name: executor.state.arrays[v.name] for v in program.updates}
    room = _rooms.setdefault(executor, {})
    for name, array in written.items():
        if name not in room:
            room[name] = aligned_empty(program.xp, array.nbytes).view(array.dtype).reshape(array.shape)
    watched = [array for name, array in written.items() if name.rpartition("/")[0] not in written]
    _guards[program] = [(room[name], array) for name, array in written.items()], watched
    return _guards[program]


def _put_back(executor: Executor, saved: Guarded) -> None:
    for copy, array in saved:
        executor.device.xp.copyto(array, copy)
    executor.state.dirty = False


def _any_nan(xp: Any, arrays: Iterable[Any]) -> bool:
    """Whether an array holds a NaN: then its sum of squares is NaN too, and nothing is quicker to compute."""
    return any(a.dtype.kind == "f" and bool(xp.isnan(xp.vdot(a, a))) for a in arrays)


def find_nan(program: Program) -> None:
    """Run step by step; NumericError at the first step that makes a NaN. Needs a program without donation."""
    for index, step in enumerate(program.steps):
        for call in step.calls:
            call()
        outs: Sequence[Any] = step.out if isinstance(step.out, tuple) else (step.out,)
        for array in outs:
            if array.dtype.kind == "f" and bool(program.xp.isnan(array).any()):
                raise _nan_error(program, index)


def _nan_error(program: Program, index: int) -> NumericError:
    for step in program.steps[:index]:  # operands may have been overwritten by the result: make them again
        for call in step.calls:
            call()
    node = program.steps[index].node
    lines = [f"{node!r} made the first NaN; its inputs are"]
    lines += [f"  {i!r}: {_range(to_numpy(program.arrays[i]))}" for i in node.inputs]
    fix = "lower the learning rate, clip gradients, or keep arguments of log, sqrt and divide away from 0"
    if node.role is Role.COMMUNICATION:
        fix = "it came from another rank: look there"
    return NumericError("\n".join(lines[:6]), fix=fix, site=node.site)


def _range(array: np.ndarray) -> str:
    """`-1.2 to 3.4, 2 NaN` for an operand."""
    if array.dtype.kind != "f":
        return f"{array.min()} to {array.max()}" if array.size else "empty"
    bad = int(np.isnan(array).sum())
    finite = array[~np.isnan(array)]
    text = f"{finite.min():.4g} to {finite.max():.4g}" if finite.size else "no number"
    return text + (f", {bad} NaN" if bad else "")
