"""ONNX's own tests of its operators, through the importer: which of them pass stands in `cases.txt`, and may only rise.

`python -m tests.onnx_.test_nodes` writes that file anew; `python -m tests.onnx_.test_nodes PATTERN` tells of cases.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu.onnx.load import FixedInputsError

LISTED = Path(__file__).with_name("cases.txt")
PASSES = "passes"
MOST_LEFT = 214  # cases that do not pass, which may only become fewer
MOST_LEFT_OPEN = 63  # of the others, those that do not where first sizes are open


def cases() -> Iterator[Any]:
    """Those of the package onnx, which makes them when it is asked."""
    loader = pytest.importorskip("onnx.backend.test.loader")
    yield from loader.load_model_tests(kind="node")


def array(value: Any) -> np.ndarray:
    from onnx import TensorProto, numpy_helper

    if isinstance(value, list | tuple):
        raise ht.errors.DataError("it is fed a sequence")
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def judge(case: Any, opened: bool = False) -> str:
    """'passes', or why not; the first size of each input may be left open."""
    model = type(case.model).FromString(case.model.SerializeToString())
    for info in model.graph.input if opened else ():
        if sizes := info.type.tensor_type.shape.dim:
            sizes[0].dim_param = f"{info.name}_0"
    try:
        for inputs, outputs in case.data_sets:
            names = [i.name for i in case.model.graph.input]
            fed = dict(zip(names, map(array, inputs)))
            try:
                loaded = ht.onnx.load(model)
            except FixedInputsError as error:
                loaded = ht.onnx.load(model, fixed={name: fed[name] for name in error.inputs})
            ex = ht.Executor([*loaded.outputs.values()])
            made = ex.run({node: fitted(fed[name], node.dtype) for name, node in loaded.inputs.items()})
            for got, wanted in zip(made, map(array, outputs), strict=True):
                compare(got, wanted, case.rtol, case.atol)
    except ht.errors.HetuError as error:
        return reason(error)
    except (AssertionError, ValueError) as error:
        return f"differs: {' '.join(str(error).split())[:60]}"
    return PASSES


def fitted(given: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Numbers of fewer bits than ours have are fed in the dtype in which they are kept."""
    return given.astype(dtype) if given.dtype.kind == "V" else given


def compare(got: np.ndarray, wanted: np.ndarray, rtol: float, atol: float) -> None:
    """As ONNX's own runner does: two last places of bfloat16, which has 8 bits, are right."""
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if got.dtype.name == "bfloat16":
        got, wanted, rtol = got.astype("f"), wanted.astype("f"), max(rtol, 2**-6)
    np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol)


def reason(error: Any) -> str:
    """In few words: operators that lack, kinds of numbers, or else the message."""
    if isinstance(error, ht.errors.DTypeError) and (found := re.search(r"is of ([A-Z0-9]+)", error.message)):
        return f"dtype {found[1]}"
    if found := re.search(r"operators of the model are not read: (.*)", error.message):
        names = re.findall(r"([\w.:]+) '[^']*'( \([^)]*\))?", found[1])
        return f"lacks {', '.join(sorted({''.join(name) for name in names}))}"
    return error.message.splitlines()[0][:90]


def listed() -> dict[str, str]:
    rows = (line.partition("\t") for line in LISTED.read_text("utf-8").splitlines())
    return {name: found for name, _, found in rows}


def test_cases_pass_as_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETU_KERNELS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the package, which makes its cases with them
        wanted = listed()
        found = {case.name: judge(case) for case in cases() if case.name in wanted}
    worse = {n: f for n, f in found.items() if f != PASSES and wanted[n] == PASSES}
    better = [n for n, f in found.items() if f == PASSES and wanted[n] != PASSES]
    assert worse == {}
    assert better == [], "write the list anew: python -m tests.onnx_.test_nodes"


@pytest.mark.nightly
def test_most_cases_pass_with_open_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number may only fall: most of these ask for how often something is repeated, or for sizes alone."""
    monkeypatch.setenv("HETU_KERNELS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = listed()
        left = [c.name for c in cases() if wanted.get(c.name) == PASSES and judge(c, opened=True) != PASSES]
    assert len(left) == MOST_LEFT_OPEN, left


def test_most_cases_pass() -> None:
    """The number may only fall."""
    assert sum(found != PASSES for found in listed().values()) == MOST_LEFT


def main(pattern: str = "") -> None:
    os.environ["HETU_KERNELS"] = "0"
    warnings.simplefilter("ignore")
    found = {case.name: judge(case) for case in cases() if pattern in case.name}
    text = "".join(f"{name}\t{result}\n" for name, result in found.items())
    print(text, end="") if pattern else LISTED.write_text(text, "utf-8")
    print(f"{sum(f == PASSES for f in found.values())} of {len(found)} pass")


if __name__ == "__main__":
    main(*sys.argv[1:])
