"""Pushes and pulls as operators: how a step's gradients reach the servers and new values come back.

`servable.py` makes them, never a model. Each names a parameter; binding a program adds the worker's connection. A push
keeps its array alive until the tick, because the array may still be on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..core.graph import Node
from ..core.op import Op, Role, op
from ..core.types import Shape, TensorType, as_dtype, axis_letters

TOKEN = TensorType((0,), np.dtype("uint8"))  # stands for "this has been sent"


def _token(*_: TensorType, **__: Any) -> TensorType:
    return TOKEN


def _pulled(*_: TensorType, shape: Shape, dtype: str, **__: Any) -> TensorType:
    return TensorType(shape, as_dtype(dtype))


def _whole_dims(gradient: TensorType, **_: Any) -> str:
    """Sharding rule of an operator that sends a whole gradient."""
    return f"{''.join(f'{c}!' for c in axis_letters(gradient.ndim))}->z"


def _token_dims(*types: TensorType, **_: Any) -> str:
    """Sharding rule of an operator that sends whole rows of a part of the batch, or a rate."""
    if len(types) == 1:
        return "->z"
    letters = axis_letters(types[1].ndim)
    ids, row = letters[: types[0].ndim], letters[types[0].ndim :]
    rate = "," if len(types) == 3 else ""
    return f"{''.join(ids)},{''.join(ids)}{''.join(f'{c}!' for c in row)}{rate}->z"


def _rows_dims(ids: TensorType, *, shape: Shape, **_: Any) -> str:
    """Sharding rule of an operator that fetches the rows of a part of the batch."""
    letters = axis_letters(len(shape))
    return f"{''.join(letters[: ids.ndim])}->{''.join(letters)}"


def _acting(
    infer: Callable[..., TensorType], dims: Callable[..., str] | None = None
) -> Callable[[Callable[..., None]], Op[..., Node]]:
    """Makes an operator of `run(out, *arrays, parameter, comm)`, which only acts: not if another rank `acts` for it."""

    def made(run: Callable[..., None]) -> Op[..., Node]:
        @op(
            name=run.__name__,
            role=Role.COMMUNICATION,
            collective="served",
            infer=infer,
            dims=dims,
            differentiable=False,
        )
        def acting(
            xp: Any, *arrays: Any, parameter: str, shape: Shape, dtype: str, order: int, comm: Any, acts: bool = True
        ) -> Any:
            out = np.empty(shape, as_dtype(dtype))
            if acts:
                run(out, *arrays, parameter=parameter, comm=comm)
            return out

        @acting.bind
        def bind(
            xp: Any, out: Any, *arrays: Any, parameter: str, comm: Any, acts: bool = True, **_: Any
        ) -> list[Callable[[], Any]]:
            return [partial(run, out, *arrays, parameter=parameter, comm=comm)] if acts else []

        acting.__doc__ = run.__doc__
        return acting

    return made


@_acting(_token, _whole_dims)
def push(out: Any, gradient: Any, *, parameter: str, comm: Any) -> None:
    """Send the gradient of a whole parameter; the result is an empty token."""
    comm.client.push(parameter, gradient)


@_acting(_token)
def push_bundle(out: Any, *gradients: Any, parameter: str, comm: Any) -> None:
    """Send the gradients of small variables that servers keep as one; the result is an empty token."""
    comm.client.push(parameter, np.concatenate([g.reshape(-1) for g in gradients]))


@_acting(_token, _token_dims)
def push_rows(out: Any, ids: Any, rows: Any, *, parameter: str, comm: Any) -> None:
    """Send the gradients of the rows `ids`, equal ids summed; the result is an empty token."""
    comm.client.push_rows(parameter, ids, rows)


@_acting(_token, _token_dims)
def descend_rows(out: Any, ids: Any, rows: Any, rate: Any, *, parameter: str, comm: Any) -> None:
    """Gradient descent on the rows `ids` of a cached table, which pushes if it must; the result is an empty token."""
    comm.rows.descend(parameter, ids, rows, float(rate))


@_acting(_token, _token_dims)
def set_rate(out: Any, rate: Any, *, parameter: str, comm: Any) -> None:
    """Tell the servers the learning rate of a parameter, once per job; the result is an empty token."""
    if comm.client.worker == 0:
        comm.client.set_rate(parameter, float(rate))


@_acting(_token)
def tick(out: Any, *sent: Any, parameter: str, comm: Any) -> None:
    """End the clock after every push of this step, then request the rows that the next step is expected to need.

    Its inputs are the tokens, and the arrays on their way.
    """
    comm.rows.tick()


@_acting(_pulled)
def pull(out: Any, ticked: Any, *, parameter: str, comm: Any) -> None:
    """The new value of a whole parameter, as the job's consistency allows."""
    comm.client.pull(parameter, out).wait()


@_acting(_pulled, _rows_dims)
def pull_rows(out: Any, ids: Any, *, parameter: str, comm: Any) -> None:
    """The rows `ids` of a table that lives on the servers."""
    comm.rows.pull(parameter, ids, out)
