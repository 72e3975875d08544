"""Every `code=` expression gives what its operator gives at every dtype, special values and mixed dtypes included."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest

from hetu.core.errors import HetuError
from hetu.core.graph import OPS, Node
from hetu.core.types import TensorType
from hetu.gpu_kernels import emulator
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.gpu_kernels.machine import RecordingMachine

from ..at_once import chosen
from ..test_special_cases import check, function, grids

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
ELEMENTWISE = sorted(name for name, op in OPS.items() if op.code is not None)
DTYPES = ("bool", "int8", "uint8", "int32", "int64", "uint64", "float16", "float32", "float64")
FEW, MANY = ("int8", "uint8"), ("int32", "int64", "uint64")  # bits
PAIRS = (("int64", "float32"), ("bool", "float16"), ("uint8", "float64"), ("float16", "float32"), ("bool", "int32"))
ATTRS = {
    "astype": [{"dtype": d} for d in ("float16", "float32", "int64")],
    "clip": [{"min": -1, "max": 3}, {"min": None, "max": 2}],
}
DIGITS = {"float16": 2e-3, "float32": 2e-6, "float64": 1e-13}


def values(dtype: str) -> np.ndarray:
    if dtype == "bool":
        return np.array([True, False] * 5)
    if "float" in dtype:
        return np.array([0.0, -0.0, 1.0, -1.5, 2.5, 0.3, np.inf, -np.inf, np.nan, 7.0], dtype)
    low = 0 if dtype.startswith("u") else -3
    return np.array([0, 1, 2, 3, 5, low, low + 1, 7, 2, 11], dtype)


def left_out(name: str) -> set[str]:
    """The integers that an operator leaves to others: each takes one of 8 bits and one of more, and all floats."""
    turn = ELEMENTWISE.index(name)
    return {*FEW, *MANY} - {FEW[turn % len(FEW)], MANY[turn % len(MANY)]}


def inputs_of(name: str, every: bool):
    op = OPS[name]
    count = len(op.inputs)
    combinations = [(d,) * count for d in DTYPES] + (list(PAIRS) if count == 2 else [])
    if name == "where":
        combinations = [("bool", a, b) for a, b in (*PAIRS, *((d, d) for d in DTYPES))]
    if not every:
        combinations = [c for c in combinations if not left_out(name) & {*c}]
    for dtypes, attrs in itertools.product(combinations, ATTRS.get(name, [op.defaults])):
        arrays = [np.roll(values(d), 3 * k) for k, d in enumerate(dtypes)]
        if name == "power" and "int" in dtypes[1]:
            arrays[1] = np.abs(arrays[1]) % 4
        yield arrays, attrs


@cache
def cases(name: str, every: bool) -> list[tuple]:
    """Those combinations whose dtypes the operator takes."""
    made = []
    for arrays, attrs in inputs_of(name, every):
        types = [TensorType(a.shape, a.dtype) for a in arrays]
        op = OPS[name]
        try:
            attrs = op.normalize_rule(*types, **attrs) if op.normalize_rule else dict(attrs)
            made.append((arrays, attrs, op.infer(*types, **attrs)))
        except HetuError:
            continue
    return made


def calls(machine, name, arrays, attrs, out):
    return bound(machine, OPS[name], out, arrays, attrs)


def on_the_page(dtype: str) -> Iterator[tuple[Node, Sequence[np.ndarray], np.ndarray]]:
    """Operators of elements, all operands in the tables of special values, and the words of what they give."""
    for g in grids(dtype):
        for name, words in g.results.items():
            node = function(name)(*g.placeholders([a.shape for a in g.arrays]))
            if node.op.code is not None:
                yield node, g.arrays, words


@pytest.fixture(scope="module")
def prepared(request: pytest.FixtureRequest) -> None:
    """The kernels of the chosen cases, compiled together."""
    recorder = RecordingMachine()
    for case in chosen(request, test_expression_equals_forward_at_every_dtype):
        for arrays, attrs, type_ in cases(**case):
            calls(recorder, case["name"], arrays, attrs, np.empty(type_.shape, type_.dtype))
    for case in chosen(request, test_special_values_are_those_of_the_page):
        for node, arrays, *_ in on_the_page(**case):
            calls(recorder, node.op.name, arrays, node.attrs, np.empty(node.shape, node.dtype))
    emulator.prepare(recorder.texts)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["in turn", "every"])
@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.sampled(30)
def test_expression_equals_forward_at_every_dtype(name, every):
    assert cases(name, every)
    for arrays, attrs, type_ in cases(name, every):
        out = np.zeros(type_.shape, type_.dtype)
        for call in calls(Emulator(["ascending"]), name, arrays, attrs, out):
            call()
        with np.errstate(all="ignore"):
            wanted = np.asarray(OPS[name].forward(np, *arrays, **attrs))
        digits = DIGITS.get(out.dtype.name, 0)
        shown = f"{name} of {[a.dtype.name for a in arrays]} {attrs}"
        np.testing.assert_allclose(out, wanted, rtol=digits, atol=digits, err_msg=shown)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_are_those_of_the_page(dtype):
    for node, arrays, words in on_the_page(dtype):
        out = np.zeros(node.shape, node.dtype)
        for call in calls(Emulator(["ascending"]), node.op.name, arrays, node.attrs, out):
            call()
        check(out, words, np.dtype(dtype), f"{node.op.name} of {dtype} {dict(node.attrs)}")
