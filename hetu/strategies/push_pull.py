"""Pushes and pulls as operators: how a step's gradients reach the servers and new values come back.

They are made by `servable.py`, never by a model. Each names a parameter; the worker's connection arrives when a program
is bound. A push keeps its array alive until the tick, because it may still be on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.op import Op, Role, op
from ..core.types import Shape, TensorType, as_dtype, axis_letters

TOKEN = TensorType((0,), np.dtype("uint8"))  # stands for "it has been sent"


def _token(*_: TensorType, **__: Any) -> TensorType:
    return TOKEN


def _pulled(*_: TensorType, shape: Shape, dtype: str, **__: Any) -> TensorType:
    return TensorType(shape, as_dtype(dtype))


def _whole_dims(gradient: TensorType, **_: Any) -> str:
    """Sharding rule of what sends a whole gradient."""
    return f"{''.join(f'{c}!' for c in axis_letters(gradient.ndim))}->z"


def _token_dims(*types: TensorType, **_: Any) -> str:
    """Sharding rule of what sends rows: those of a part of the batch, and each whole."""
    if len(types) == 1:
        return "->z"  # a rate
    letters = axis_letters(types[1].ndim)
    ids, row = letters[: types[0].ndim], letters[types[0].ndim :]
    rate = "," if len(types) == 3 else ""
    return f"{''.join(ids)},{''.join(ids)}{''.join(f'{c}!' for c in row)}{rate}->z"


def _rows_dims(ids: TensorType, *, shape: Shape, **_: Any) -> str:
    """Sharding rule of what fetches rows: those of a part of the batch."""
    letters = axis_letters(len(shape))
    return f"{''.join(letters[: ids.ndim])}->{''.join(letters)}"


def _made(
    name: str, infer: Callable[..., TensorType], run: Callable[..., None], dims: Callable[..., str] | None = None
) -> Op:
    """An operator that only acts: `run(out, *arrays, comm, **attrs)`; not if another rank `acts` on the same arrays."""

    def forward(
        xp: ModuleType, *arrays: Any, parameter: str, shape: Shape, dtype: str, order: int, comm: Any, acts: bool = True
    ) -> Any:
        out = np.empty(shape, as_dtype(dtype))
        if acts:
            run(out, *arrays, parameter=parameter, comm=comm)
        return out

    made = op(forward, name=name, role=Role.COMMUNICATION, infer=infer, dims=dims, differentiable=False)
    made.__doc__ = run.__doc__

    def bind(
        xp: ModuleType, out: Any, *arrays: Any, parameter: str, comm: Any, acts: bool = True, **_: Any
    ) -> list[Callable[[], Any]]:
        return [partial(run, out, *arrays, parameter=parameter, comm=comm)] if acts else []

    made.bind(bind)
    return made


def _push(out: Any, gradient: Any, *, parameter: str, comm: Any) -> None:
    """Send the gradient of a whole parameter; the result is an empty token."""
    comm.client.push(parameter, gradient)


def _push_rows(out: Any, ids: Any, rows: Any, *, parameter: str, comm: Any) -> None:
    """Send the gradients of the rows `ids`, equal ids summed; the result is an empty token."""
    comm.client.push_rows(parameter, ids, rows)


def _descend_rows(out: Any, ids: Any, rows: Any, rate: Any, *, parameter: str, comm: Any) -> None:
    """Gradient descent on the rows `ids` of a cached table, which sends what it must; the result is an empty token."""
    comm.rows.descend(parameter, ids, rows, float(rate))


def _set_rate(out: Any, rate: Any, *, parameter: str, comm: Any) -> None:
    """Tell the servers the learning rate of a parameter, once for the whole job; the result is an empty token."""
    if comm.client.worker == 0:
        comm.client.set_rate(parameter, float(rate))


def _tick(out: Any, *sent: Any, parameter: str, comm: Any) -> None:
    """End the clock: every push of this step has left. Its inputs are the tokens, and the arrays on their way.

    Then ask for the rows that the next step is expected to need.
    """
    comm.rows.tick()


def _pull(out: Any, ticked: Any, *, parameter: str, comm: Any) -> None:
    """The new value of a whole parameter, as the job's consistency allows."""
    comm.client.pull(parameter, out).wait()


def _pull_rows(out: Any, ids: Any, *, parameter: str, comm: Any) -> None:
    """The rows `ids` of a table that lives on the servers."""
    comm.rows.pull(parameter, ids, out)


push = _made("push", _token, _push, _whole_dims)
push_rows = _made("push_rows", _token, _push_rows, _token_dims)
descend_rows = _made("descend_rows", _token, _descend_rows, _token_dims)
set_rate = _made("set_rate", _token, _set_rate, _token_dims)
tick = _made("tick", _token, _tick)
pull = _made("pull", _pulled, _pull)
pull_rows = _made("pull_rows", _pulled, _pull_rows, _rows_dims)
