"""Every operator application in the table of samples that has a kernel, at three dtypes, with the values it must give.

In float32 one array of each begins an element behind a place to which packs are aligned, as a view may; which one is
chosen by the operator, or by the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import Node, topological
from hetu.core.simplify import interpret
from hetu.gpu_kernels.launchers import KERNELS, bound
from hetu.gpu_kernels.machine import Machine, RecordingMachine, address

from ..samples import SAMPLES, Sample

DTYPES = ("float64", "float32", "float16")
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 4e-3}  # by the dtype of a result; others are exact


class Case(NamedTuple):
    """One operator on given arrays."""

    node: Node
    dtype: str
    arrays: list[np.ndarray]

    def wanted(self) -> tuple[np.ndarray, ...]:
        """What the forward function gives; half precision is computed in float64, as kernels round only results."""
        wide = [a.astype(np.float64) if a.dtype == np.float16 else a for a in self.arrays]
        result = self.node.op.forward(np, *wide, **self.node.attrs)
        return tuple(map(np.asarray, result)) if isinstance(result, tuple) else (np.asarray(result),)

    @property
    def types(self) -> tuple[Any, ...]:
        """Of the results."""
        return self.node.type if isinstance(self.node.type, tuple) else (self.node.type,)

    def calls(
        self, machine: Machine, xp: Any = np, late: int | None = None
    ) -> tuple[list[Any] | None, tuple[Any, ...]]:
        """The calls on a machine and the arrays they fill, which hold 77 before; array `late` begins anywhere."""
        all_ = [xp.asarray(a) for a in (*self.arrays, *(np.full(t.shape, 77, t.dtype) for t in self.types))]
        if self.dtype == "float32":
            number = crc32(repr((self.node.op.name, self.node.attrs)).encode()) if late is None else late
            k = number % len(all_)
            all_[k] = shifted(all_[k], 1, xp)
        arrays, outs = all_[: len(self.arrays)], tuple(all_[len(self.arrays) :])
        out = outs if isinstance(self.node.type, tuple) else outs[0]
        return bound(machine, self.node.op, out, arrays, self.node.attrs), outs


def shifted(array: Any, elements: int, xp: Any = np) -> Any:
    """A copy that begins so many elements behind a multiple of 64 bytes."""
    room = xp.empty(array.nbytes + 128, "uint8")
    start = -address(room) % 64 + elements * array.itemsize
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def assert_close(outs: Sequence[np.ndarray], case: Case) -> None:
    for got, wanted in zip(outs, case.wanted(), strict=True):
        tolerance = TOLERANCE.get(got.dtype.name, 0)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance, err_msg=repr(case.node))


def recorded(module: Any, work: Callable[[], object]) -> list[str]:
    """The texts that work on the emulators of a module asks for, whatever comes out."""
    recorder = RecordingMachine()
    with pytest.MonkeyPatch.context() as patch, suppress(AssertionError):
        patch.setattr(module, "Emulator", lambda *_, **__: recorder)
        patch.setattr(np.testing, "assert_allclose", lambda *_, **__: None)
        work()
    return [*recorder.texts]


def has_kernel(node: Node) -> bool:
    return node.op.code is not None or KERNELS.function(node.op) is not None


def of_sample(sample: Sample, dtype: str) -> Iterator[Case]:
    arrays = [a.astype(dtype) if a.dtype.kind == "f" else a for a in sample.arrays()]
    nodes = [ht.placeholder(f"x{i}", a.shape, a.dtype) for i, a in enumerate(arrays)]
    built = sample.build(*nodes)
    outputs = tuple(built) if isinstance(built, tuple | list) else (built,)
    feed = dict(zip(nodes, arrays))
    chosen = [n for n in topological(outputs) if has_kernel(n)]
    needed = list(dict.fromkeys(i for n in chosen for i in n.inputs))
    values = dict(zip(needed, interpret(needed, feed)))
    for node in chosen:
        yield Case(node, dtype, [np.ascontiguousarray(np.asarray(values[i])).reshape(i.shape) for i in node.inputs])


@cache
def uncompiled_cases() -> dict[tuple[str, str], list[Case]]:
    """By row and dtype; rows without a kernel are left out."""
    found = {}
    for dtype in DTYPES:
        for sample in SAMPLES:
            if dtype == "float16" and sample.extra.get("no_float16"):
                continue
            if cases := list(of_sample(sample, dtype)):
                found[sample.id, dtype] = cases
    return found


def ids() -> list[str]:
    """Names of the rows; building a row is cheap, computing it is left to the tests."""
    return [s.id for s in SAMPLES]
