"""Products by cuBLAS are those of NumPy, whatever lies transposed, apart or broadcast; and CuPy has what hetu calls."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

import numpy as np
import pytest

import hetu
from hetu.core.backend import Device
from hetu.gpu_kernels import products
from hetu.gpu_kernels.capture import Captured

from . import fake_cupy
from .fake_streams import LOG

PACKAGE = Path(hetu.__file__).parent
LAYOUTS = {
    "rows": ((5, 7), (7, 3), lambda a, b: (a, b)),
    "transposed": ((7, 5), (3, 7), lambda a, b: (a.T, b.T)),
    "batches": ((4, 5, 7), (4, 7, 3), lambda a, b: (a, b)),
    "a batch of transposes": ((4, 7, 5), (4, 3, 7), lambda a, b: (a.swapaxes(1, 2), b.swapaxes(1, 2))),
    "heads between rows": ((2, 5, 4, 7), (2, 3, 4, 7), lambda a, b: (a.swapaxes(1, 2), b.transpose(0, 2, 3, 1))),
    "one matrix for all": ((5, 7), (2, 4, 7, 3), lambda a, b: (a, b)),
    "broadcast both ways": ((2, 1, 5, 7), (4, 7, 3), lambda a, b: (a, b)),
    "a part of the columns": ((5, 9), (7, 6), lambda a, b: (a[:, 1:8], b[:, ::2])),
    "one row and one column": ((1, 7), (7, 1), lambda a, b: (a, b)),
}


@pytest.fixture
def xp():
    with fake_cupy.installed():
        yield Device("gpu").xp


def operands(xp, layout, *dtypes):
    rng, (a, b, change) = np.random.default_rng(0), LAYOUTS[layout]
    return change(*(xp.asarray(rng.standard_normal(s).astype(d)) for s, d in zip((a, b), dtypes)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_of_every_layout(layout, dtype, xp):
    a, b = operands(xp, layout, dtype, dtype)
    wanted = np.matmul(a.get(), b.get())
    apart = xp.empty((*wanted.shape, 2), dtype)[..., 0]
    for out in (None, xp.empty(wanted.shape, dtype), apart):
        LOG.clear()
        got = xp.matmul(a, b, out=out)
        assert LOG.count("product") == 1 and (out is None or got is out)
        np.testing.assert_allclose(got.get(), wanted, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-2)


ODD = {  # sizes m, k, n, what is turned, and the copies: of a, of b, of the result
    "nothing": ((5, 16, 24), "", 0),
    "rows of the result": ((5, 16, 9), "", 2),  # and so of b
    "both sides of a sum": ((5, 9, 16), "", 2),
    "all": ((5, 9, 11), "", 3),
    "rows of several blocks": ((3, 16, 4101), "", 2),
    "turned": ((5, 9, 16), "ab", 3),
    "a turned": ((9, 16, 24), "a", 2),
    "b turned": ((16, 24, 9), "b", 2),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_unaligned_rows_of_16_bits_are_multiplied_between_copies(case, dtype, xp, monkeypatch):
    monkeypatch.setattr(products, "WORTH", 0)
    monkeypatch.setattr(products, "LEAST", 0)
    (m, k, n), turned, copies = ODD[case]
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (k, n)))
    there = [xp.asarray(x.T.copy()).T if name in turned else xp.asarray(x) for name, x in (("a", a), ("b", b))]
    LOG.clear()
    got = xp.matmul(*there)
    assert LOG.count("kernel fit") == (copies if dtype == "float16" else 0) and LOG.count("product") == 1
    np.testing.assert_allclose(got.get(), a @ b, rtol=2e-3, atol=1e-2)


def test_small_products_are_not_worth_copies(xp):
    LOG.clear()
    xp.matmul(xp.ones((128, 512), "float16"), xp.ones((512, 10), "float16"))
    assert "kernel fit" not in LOG


def test_floats_of_two_dtypes_meet_in_the_wider_and_integers_are_left_to_cupy(xp):
    a, b = operands(xp, "batches", "float16", "float32")
    assert xp.matmul(a, b).dtype == "float32"
    LOG.clear()
    np.testing.assert_array_equal(
        xp.matmul(xp.arange(4).reshape(2, 2), xp.ones((2, 2), "int64")).get(), [[1, 1], [5, 5]]
    )
    assert "product" not in LOG


def test_a_product_is_captured_and_that_of_cupy_is_not(xp):
    a, b = operands(xp, "batches", "float32", "float32")
    out, said = xp.empty((4, 5, 3), "float32"), []
    for matmul in (xp.matmul, fake_cupy.MODULE.matmul):
        with Device("gpu").stream():
            captured = Captured(xp, [lambda f=matmul: f(a, b, out=out)], lambda call, reason: said.append(reason))
            captured.run()
            captured.run()
    assert said == ["NotImplementedError: calling cuBLAS API during stream capture is currently unsupported"]


@pytest.mark.parametrize("count", [3, 9, 70])
def test_many_arrays_are_joined_in_a_graph(count, xp):
    parts, made, said = [xp.full((2, 3), float(k)) for k in range(count)], [], []
    for module in (xp, fake_cupy.MODULE):
        with Device("gpu").stream():
            calls = [lambda m=module: made.append((m.concat(parts, axis=1), m.stack(parts, axis=1)))]
            captured = Captured(xp, calls, lambda call, reason: said.append(reason))
            captured.run()
            captured.run()
    joined, stacked = made[0]
    np.testing.assert_array_equal(joined.get(), np.concatenate([p.get() for p in parts], axis=1))
    np.testing.assert_array_equal(stacked.get(), np.stack([p.get() for p in parts], axis=1))
    assert said == (["RuntimeError: it copies an array of the host"] if count > 8 else [])


# -- what of CuPy is called --------------------------------------------------------------------------------------------


def chain(node: ast.AST) -> list[str]:
    """`self.xp.cuda.Event` -> [self, xp, cuda, Event]; nothing for what is no chain of names."""
    if isinstance(node, ast.Name):
        return [node.id]
    before = chain(node.value) if isinstance(node, ast.Attribute) else []
    return [*before, node.attr] if before else []


def uses(source: str) -> set[tuple[str, tuple[str, ...]]]:
    """The names below `xp` with the keywords that they are called with; `cuda` is what `xp.cuda` is called locally."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = chain(node.func if isinstance(node, ast.Call) else node)
        if "xp" in names:
            names = names[names.index("xp") + 1 :]
        elif names[:1] != ["cuda"]:
            continue
        keywords = [k.arg for k in node.keywords if k.arg] if isinstance(node, ast.Call) else []
        if names:
            found.add((".".join(names), tuple(keywords)))
    return found


def test_the_walker_sees_names_and_keywords():
    assert uses("machine.xp.empty(3, dtype=d)\nself.xp.cuda.Event\ncuda.x") == {
        ("empty", ("dtype",)), ("empty", ()), ("cuda", ()), ("cuda.Event", ()), ("cuda.x", ()),
    }  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason='no CuPy: pip install "hetu-dl[cuda-check]"')
def test_cupy_has_what_is_called():
    cupy, missing = importlib.import_module("cupy"), []
    for file in sorted(PACKAGE.rglob("*.py")):
        for name, keywords in uses(file.read_text("utf-8")):
            found = cupy
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is None:
                missing.append(f"{file.name}: {name}")
                continue
            missing += [f"{file.name}: {name}({k}=)" for k in keywords if not takes(found, k)]
    assert missing == []


def takes(function, keyword: str) -> bool:
    """Whether a function has a parameter; those compiled without a signature tell it in their first line, or not."""
    try:
        parameters = inspect.signature(function).parameters
        return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    except (TypeError, ValueError):
        first = (function.__doc__ or "").strip().split("\n\n")[0]
        return keyword in first or "(" not in first
