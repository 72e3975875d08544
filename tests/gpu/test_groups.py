"""Kernels of whole groups, with several results and with reductions: their values, and which groups there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu import nn, optim
from hetu.core.graph import OPS, Node, topological
from hetu.core.passes import PASSES
from hetu.core.simplify import interpret
from hetu.cpu_kernels.group_text import GroupLayout, GroupWriter
from hetu.cpu_kernels.short_rows import ShortRowsWriter
from hetu.fuse.form import fused
from hetu.fuse.group import NEAR, fuse
from hetu.gpu_kernels import emulator, nvrtc
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.groups import launched
from hetu.gpu_kernels.machine import RecordingMachine
from hetu.gpu_kernels.passes.fuse_kernels import LIMITS, SMALL, fuse_kernels
from hetu.look.profiler import traffic
from hetu.passes import chosen_passes

from ..fuse.test_groups import CASES, feed_of
from ..pairs import in_turn
from . import fake_cupy
from .test_compile import together

compiled = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
RNG = np.random.default_rng(0)


def group(*outputs: Node) -> Node:
    """The only fused node of the graph, which is all there is beside views."""
    nodes = [n for n in topological(fuse_kernels(outputs)) if n.inputs and n.op.name not in ("item", "reshape")]
    (node,) = nodes
    return node


def placed(name: str, shape: tuple[int, ...], dtype: str = "float32") -> Node:
    return ht.placeholder(name, shape, dtype)


def relu_and_its_bias_gradient(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    """The gradient of a rectified layer, and what it adds to the bias."""
    g, y, b = placed("g", shape, dtype), placed("y", shape, dtype), placed("b", shape[-1:], dtype)
    dx = g * ht.astype(y > 0, dtype=dtype)
    return [dx, ht.sum_to_like(dx, b)]


def per_channel(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    g, b = placed("g", shape, dtype), placed("b", (shape[1], 1, 1), dtype)
    dx = ht.square(g)
    return [dx, ht.sum_to_like(dx, b)]


def along_rows(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    x, scale, offset = placed("x", shape, dtype), placed("s", shape[-1:], dtype), placed("o", (*shape[:-1], 1), dtype)
    y = x * scale + offset
    return [y, ht.tanh(y), ht.max(y, axis=-1), ht.sum(y * y, axis=-1, keepdims=True)]


def along_rows_of_two_axes(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    x, scale = placed("x", shape, dtype), placed("s", shape[-1:], dtype)
    y = x * scale
    return [y, ht.max(y, axis=(-2, -1))]


def of_all(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    """What a step in 16 bits does with a gradient."""
    g, scale = placed("g", shape, dtype), placed("scale", ())
    unscaled = ht.astype(g, dtype="float32") / scale
    return [unscaled, ht.all(ht.isfinite(unscaled)), ht.min(unscaled)]


def dropped(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    """Two masks over one sum, and what the second adds to a bias."""
    x, y, state = placed("x", shape, dtype), placed("y", shape, dtype), placed("state", (2,), "uint64")
    one = OPS["dropout"](x, state, rate=0.3, stream=5) + y
    two = OPS["dropout"](one, state, rate=0.5, stream=6)
    return [one, two, ht.sum_to_like(two, placed("b", shape[-1:], dtype))]


def dropped_without_sum(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    return dropped(dtype, shape)[:2]


def dropped_along_rows(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    one, two, _ = dropped(dtype, shape)
    return [one, two, ht.max(two, axis=-1)]


def many_folds(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    """As many reductions as a group may have, by threads of 16 neighbors: shared memory has to do for all."""
    x, state = placed("x", shape, dtype), placed("state", (2,), "uint64")
    y = OPS["dropout"](x, state, rate=0.3, stream=5)
    finite = ht.isfinite(y)
    return [y, ht.sum(y, axis=0), ht.max(y, axis=0), ht.all(finite, axis=0), ht.any(finite, axis=0), ht.min(y, axis=0)]


def softmax_by_hand(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    """A row waits for its maximum, then for its sum, and is read for the third time."""
    x = placed("x", shape, dtype)
    y = ht.exp(x - ht.max(x, axis=-1, keepdims=True))
    total = ht.sum(y, axis=-1, keepdims=True)
    return [y / total, ht.log(total)]


def dropped_and_normalized(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    """What is drawn is drawn again in the second loop; the first operand is overwritten only there."""
    x, scale, state = placed("x", shape, dtype), placed("scale", shape[-1:], dtype), placed("state", (2,), "uint64")
    y = OPS["dropout"](x, state, rate=0.3, stream=5) + x
    return [(y - ht.expand_dims(ht.min(y, axis=-1), axis=-1)) * scale, ht.abs(y)]


def columns_and_numbers_of_rows(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    """A fold over the rows, beside what each row has once."""
    x, scale = placed("x", shape, dtype), ht.exp(placed("s", (shape[0], 1), dtype))
    return [x * scale, ht.sum(x * scale, axis=0), scale]


def numbers_of_rows(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    x, scale = placed("x", shape, dtype), ht.exp(placed("s", (shape[0], 1), dtype))
    return [x * scale, scale]


def cut_off(dtype: str, shape: tuple[int, ...]) -> list[Node]:
    """Integers on the way, which become floats again."""
    x = placed("x", shape, dtype)
    return [whole := ht.astype(x, dtype="int32"), x * ht.astype(whole, dtype=dtype)]


GROUPS = {
    "integers": (cut_off, (9, 40)),
    "columns, numbers of rows": (columns_and_numbers_of_rows, (37, 40)),
    "numbers of rows": (numbers_of_rows, (9, 40)),
    "softmax of a warp": (softmax_by_hand, (5, 40)),
    "softmax of a block": (softmax_by_hand, (2, 3, 2052)),
    "dropout, two loops": (dropped_and_normalized, (3, 48)),
    "dropout, two odd loops": (dropped_and_normalized, (3, 37)),
    "many folds": (many_folds, (10, 48)),
    "dropout": (dropped_without_sum, (6, 32)),
    "dropout, odd": (dropped_without_sum, (7, 13)),
    "dropout, columns": (dropped, (50, 48)),
    "dropout, odd columns": (dropped, (9, 36)),
    "dropout, rows": (dropped_along_rows, (5, 80)),
    "columns": (relu_and_its_bias_gradient, (70, 40)),
    "columns, chunks": (relu_and_its_bias_gradient, (300, 36)),
    "columns, odd": (relu_and_its_bias_gradient, (3, 5, 33)),
    "channels": (per_channel, (3, 4, 6, 6)),
    "rows of a warp": (along_rows, (9, 36)),
    "rows, odd": (along_rows, (2, 3, 45)),
    "rows of a block": (along_rows, (3, 2052)),
    "rows in chunks": (along_rows, (2, 5000)),
    "odd rows of a block": (softmax_by_hand, (2, 2051)),
    "odd rows in chunks": (along_rows, (2, 4999)),
    "rows of few": (softmax_by_hand, (3, 5)),
    "odd rows of two axes": (along_rows_of_two_axes, (3, 5, 9)),
    "all": (of_all, (40, 130)),
}


def fed(node: Node) -> list[np.ndarray]:
    return [np.asarray(RNG.uniform(-2, 2, i.shape) if i.dtype != "uint64" else [11, 3], i.dtype) for i in node.inputs]


def run(machine, node: Node, arrays):
    types = node.type if isinstance(node.type, tuple) else (node.type,)
    outs = tuple(np.full(t.shape, 77, t.dtype) for t in types)
    calls = launched(machine, outs, *arrays, **node.attrs)
    for call in calls:
        call()
    return outs, len(calls)


def cases():
    return {
        (name, d): group(*build(d, shape)) for name, (build, shape) in GROUPS.items() for d in ("float32", "float16")
    }


@compiled
def test_a_group_gives_what_its_operators_give():
    """In three orders of threads. Results and extrema are equal; sums are wide inside and rounded once."""
    made = {key: (node, fed(node)) for key, node in cases().items()}
    recorder = RecordingMachine()
    for node, arrays in made.values():
        run(recorder, node, arrays)
    emulator.prepare(recorder.texts)
    for key, (node, arrays) in made.items():
        outs, _ = run(Emulator(), node, arrays)
        for summed, out, exact in zip(behind_sums(node), outs, wanted(node, arrays), strict=True):
            digits = 1e-6 if not summed else 1e-5 if out.dtype == np.float32 else 2e-3
            np.testing.assert_allclose(out, exact, rtol=digits, atol=digits, err_msg=str(key))


def behind_sums(node: Node) -> list[bool]:
    """Which results are sums, or what a row computes when it knows its own."""
    form, values = node.attrs["form"], node.attrs["form"].values()
    return [values[r].phase > 0 or form.lines[r - len(form.types)].op is OPS["sum"] for r in form.results]


def wanted(node: Node, arrays) -> list[np.ndarray]:
    """By NumPy, one operator after the other; sums of what these rounded are added in float64.

    Dropout is computed in float32 at least, as its own kernel does.
    """
    known, form = list(arrays), node.attrs["form"]
    for (op, operands, attrs), value in zip(form.lines, form.values()[len(arrays) :]):
        inputs = [np.asarray(o[1], o[0]) if isinstance(o, tuple) else known[o] for o in operands]
        wide = {"sum": np.float64, "dropout": np.float32}.get(op.name, inputs[0].dtype)
        made = op.forward(np, inputs[0].astype(wide), *inputs[1:], **dict(attrs))
        known.append(made.astype(value.type.dtype))
    return [known[r] for r in form.results]


@pytest.mark.sampled(3)
@compiled
@pytest.mark.parametrize("layout", ["permuted", "sliced", "broadcast", "beside others"])
def test_operands_of_any_strides(layout):
    """Operands that are views: packs where neighbors lie together, else one by one."""
    node = group(*along_rows("float32", (6, 8, 35 if layout == "beside others" else 36)))
    arrays = fed(node)
    x = {
        "permuted": RNG.standard_normal((36, 6, 8), np.float32).transpose(1, 2, 0),
        "sliced": RNG.standard_normal((6, 16, 72), np.float32)[:, ::2, ::2],
        "broadcast": np.broadcast_to(RNG.standard_normal((6, 1, 36), np.float32), (6, 8, 36)),
        "beside others": RNG.standard_normal((6, 8, 40), np.float32)[:, :, :35],
    }[layout]
    arrays[[i.name for i in node.inputs].index("x")] = x
    outs, _ = run(Emulator(), node, arrays)
    for out, exact in zip(outs, wanted(node, arrays), strict=True):
        np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not nvrtc.available(), reason='no NVRTC: pip install "hetu-dl[cuda-check]"')
@pytest.mark.parametrize(("part", "architecture"), in_turn(2, range(2), nvrtc.ARCHITECTURES))
def test_all_texts_compile(part, architecture):
    """The half of them for one architecture in turn; nightly all for each."""
    recorder = RecordingMachine()
    for (_, dtype), node in cases().items():
        if dtype == "float16":  # which has more to convert
            run(recorder, node, fed(node))
    assert nvrtc.cubin(together([*recorder.texts][part::2]), architecture).startswith(b"\x7fELF")


def test_launches():
    """One, and one more where a reduction is left in parts."""
    launches = {
        name: run(RecordingMachine(), node, fed(node))[1]
        for (name, dtype), node in cases().items()
        if dtype == "float32"
    }
    assert launches == {
        "integers": 1,
        "columns, numbers of rows": 2,
        "numbers of rows": 1,
        "softmax of a warp": 1,
        "softmax of a block": 1,
        "dropout, two loops": 1,
        "dropout, two odd loops": 1,
        "many folds": 1,
        "dropout": 1,
        "dropout, odd": 1,
        "dropout, columns": 2,
        "dropout, odd columns": 1,
        "dropout, rows": 1,
        "columns": 2,
        "columns, chunks": 2,
        "columns, odd": 1,
        "channels": 2,
        "rows of a warp": 1,
        "rows, odd": 1,
        "rows of a block": 1,
        "rows in chunks": 3,
        "odd rows of a block": 1,
        "odd rows in chunks": 3,
        "rows of few": 1,
        "odd rows of two axes": 1,
        "all": 3,
    }


@compiled
@pytest.mark.parametrize(("late", "pack"), [(0, 8), (4, 4), (1, 1)])
def test_packs_are_those_of_16_bits_beside_vectors_of_more(late, pack):
    """Which begin where the device can load as many."""
    x, scale = placed("x", (3, 40), "float16"), placed("s", (40,))
    node, recorder = group(ht.astype(ht.astype(x, dtype="float32") * scale, dtype="float16")), RecordingMachine()
    arrays = [RNG.standard_normal(i.shape).astype(i.dtype) for i in node.inputs]
    at = [i.name for i in node.inputs].index("s")
    begins = np.empty(60, "float32")
    first = (-begins.ctypes.data // 4) % 8 + late
    begins[first : first + 40] = arrays[at]
    arrays[at] = begins[first : first + 40]
    run(recorder, node, arrays)
    assert f"= load<{pack}>(x{at} +" in next(iter(recorder.texts))
    ((out,), _), (exact,) = run(Emulator(), node, arrays), wanted(node, arrays)
    np.testing.assert_array_equal(out, exact)


@pytest.mark.parametrize(("gap", "pack"), [(4, 4), (2, 2), (1, 1)])
def test_packs_begin_where_the_device_can_load_them(gap, pack):
    """Rows that do not begin on a multiple of the pack make it smaller."""
    node, recorder = group(*along_rows("float32", (6, 8, 36))), RecordingMachine()
    arrays = fed(node)
    arrays[[i.name for i in node.inputs].index("x")] = np.zeros((6, 8, 36 + gap), np.float32)[:, :, :36]
    run(recorder, node, arrays)
    assert f"= load<{pack}>(x" in next(iter(recorder.texts))


@pytest.mark.parametrize(("name", "loops"), [("softmax of a warp", 0), ("odd rows of a block", 3)])
def test_rows_of_any_length_move_in_packs(name, loops):
    node, recorder = cases()[name, "float16"], RecordingMachine()
    run(recorder, node, fed(node))
    (text,) = recorder.texts
    assert text.count("for_packs<8>(") == loops and text.count(f"= load<{'N' if loops else 8}>(x0") == 3


def test_rows_of_any_length_whose_results_begin_anywhere_do_not_move_in_packs():
    node, recorder = cases()["odd rows of a block", "float16"], RecordingMachine()
    late = tuple(np.empty(t.size + 1, t.dtype)[1:].reshape(t.shape) for t in node.type)
    launched(recorder, late, *fed(node), **node.attrs)
    assert "for_packs<" not in next(iter(recorder.texts)).partition('#line 1 "rows of a group"')[2]


# -- the form that the CPU has, too ------------------------------------------------------------------------------------


def whole_cases(dtype: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Node, list[np.ndarray]]]:
    """The groups of what has a kernel of its own here, with arrays for them."""
    limits = replace(LIMITS, whole=lambda node: False)
    for case, (build, _) in CASES.items():
        outputs = PASSES["simplify"](build(ht.placeholder("x", shape, dtype)))
        feed = feed_of(outputs, np.random.default_rng(3))
        for node in topological(fuse(outputs, limits, lambda op: None)):
            if "form" in node.attrs:
                yield case, node, interpret(node.inputs, feed)


@pytest.mark.sampled(2)
@compiled
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_a_group_on_the_cpu_is_right_on_a_gpu(dtype):
    """A norm, a softmax, a cross entropy with its gradient: each row is visited until its folds are known."""
    shapes = [(6, 5), (3, 4, 100), (2, 1100)]
    found = [row for shape in shapes for row in whole_cases(dtype, shape)]
    recorder = RecordingMachine()
    for _, node, arrays in found:
        run(recorder, node, arrays)
    emulator.prepare(recorder.texts)
    tolerance = 2e-5 if dtype == "float32" else 1e-9
    for case, node, arrays in found:
        plain = fused.forward(np, *arrays, form=node.attrs["form"])
        outs, _ = run(Emulator(), node, arrays)
        for got, right in zip(outs, plain if isinstance(plain, tuple) else (plain,), strict=True):
            np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance, err_msg=case)


def test_the_lines_are_the_same_text_in_c_and_in_cuda():
    layout = GroupLayout(1, ((True,),) * 20, (1,) * 20)
    for case, node, arrays in whole_cases("float32", (6, 36)):
        form, recorder = node.attrs["form"], RecordingMachine()
        run(recorder, node, arrays)
        texts = [w(form, layout).written().text for w in (GroupWriter, ShortRowsWriter)]
        cuda, *c = ({*re.findall("(const .*;)  // ", text)} for text in (next(iter(recorder.texts)), *texts))
        assert c == [cuda, cuda] and cuda, case


# -- which groups there are --------------------------------------------------------------------------------------------


def sizes(*outputs: Node) -> list[tuple[int, int]]:
    """(lines, results) of each fused node."""
    nodes = [n for n in topological(fuse_kernels(outputs)) if n.op.name == "fused"]
    return [(len(n.attrs["form"].lines), len(n.attrs["form"].results)) for n in nodes]


def whole(x: Node) -> Node:
    """What is in no group."""
    return ht.cumsum(x, axis=-1)


def test_no_path_leads_out_of_a_group_and_back():
    x = placed("x", (200, 200))
    y = ht.exp(x)
    assert sizes(y + whole(x)) == [(2, 1)]
    assert sizes(y + whole(y)) == []
    assert sizes(y - ht.max(y, axis=1, keepdims=True)) == [(3, 1)]  # a team waits for its own row
    far = ht.exp(placed("x", (2, 10_000)))
    assert sizes(far - ht.max(far, axis=1, keepdims=True)) == [(2, 2)]  # several teams share a row


def test_two_groups_do_not_wait_for_each_other():
    x, z = placed("x", (200, 200)), placed("z", (200, 200))
    a, b = ht.exp(x), z * 2.0
    both = [x * whole(b), z + whole(a)]
    assert sizes(a, both[0]) == sizes(b, both[1]) == [(2, 2)]
    assert sizes(a, b, *both) == [(2, 2)]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.sampled(8)
def test_random_graphs_stay_graphs(seed):
    """Groups that need each other would leave nothing to begin with."""
    rng = np.random.default_rng(seed)
    nodes = [placed(f"x{k}", (200, 200)) for k in range(3)]
    for _ in range(60):
        a, b = (nodes[k] for k in rng.integers(max(0, len(nodes) - 25), len(nodes), 2))
        nodes.append([a + b, a * b, whole(a), a + ht.sum(b, axis=0)][rng.integers(4)])
    before = nodes[-10:]
    after = fuse_kernels(before)
    assert [n.type for n in after] == [n.type for n in before]
    assert len(topological(after)) < len(topological(before)) + 60


def test_a_large_result_is_not_made_long_before_it_is_read():
    """It would take memory all the while; a small one may, where it saves a launch or reading a large array."""
    x = placed("x", (1024, 1024))
    first = later = ht.exp(x)
    for _ in range(NEAR):
        later = whole(later)
    assert sizes(first, later, ht.tanh(x)) == []
    assert sizes(first, later, ht.sum(x, axis=0)) == [(2, 2)]
    assert sizes(first, whole(first), ht.tanh(x)) == [(2, 2)]


def test_small_neighbors_share_a_launch():
    """As running means and variances do: nothing is read twice, but a launch takes longer than the work."""
    means = [placed(f"m{k}", (64,)) * 0.9 + placed(f"n{k}", (64,)) * 0.1 for k in range(4)]
    assert sizes(*means) == [(12, 4)]
    large = [placed(f"m{k}", (SMALL + 1,)) * 0.9 + placed(f"n{k}", (SMALL + 1,)) * 0.1 for k in range(2)]
    assert sizes(*large) == [(3, 1), (3, 1)]
    many = [placed("x", (64,)) + float(k) for k in range(LIMITS.results + 2)]
    assert max(results for _, results in sizes(*many)) == LIMITS.results


def test_the_bias_of_a_linear_layer_joins_what_follows():
    x, w, b = placed("x", (40, 30)), placed("w", (30, 50)), placed("b", (50,))
    y = ht.linear(x, w, b)
    assert sizes(ht.gelu(y)) == [(2, 1)]
    feed = dict(zip((x, w, b), (RNG.standard_normal(n.shape, np.float32) for n in (x, w, b))))
    old, new = (interpret([n], feed)[0] for n in (ht.gelu(y), *fuse_kernels([ht.gelu(y)])))
    np.testing.assert_array_equal(old, new)


def test_reductions_that_kernels_do_not_follow_stay():
    x = placed("x", (40, 30, 50))
    assert sizes(ht.sum(ht.exp(x), axis=1)) == []
    for axis, shape in [((0, 1), (50,)), ((1, 2), (40,)), ((0, 2), (30,)), ((0, 1, 2), ()), (0, (30, 50))]:
        (total,) = fuse_kernels([ht.sum(ht.exp(x), axis=axis)])
        assert total.shape == shape and total.op.name == "fused"
    assert sizes(ht.sum(ht.exp(placed("x", (9000, 3))), axis=1)) == []  # of 32 threads 3 would work


# -- whole training steps ----------------------------------------------------------------------------------------------


def mlp() -> tuple[Node, dict]:
    x, t = ht.placeholder("x", (256, 784)), ht.placeholder("t", (256,), "int64")
    hidden = [nn.Linear(784, 512, activation=ht.gelu), nn.Dropout(0.1), nn.Linear(512, 512, activation=ht.gelu)]
    return ht.mean(ht.softmax_cross_entropy(nn.Sequential(*hidden, nn.Linear(512, 10))(x), t)), optim.Adam(1e-3)


def gpt_block() -> tuple[Node, dict]:
    x, t = ht.placeholder("x", (4, 64, 128)), ht.placeholder("t", (4, 64), "int64")
    h = nn.TransformerBlock(128, 4, dropout=0.1)(x)
    return ht.mean(ht.softmax_cross_entropy(h, t)), optim.Adam(1e-3)


def gpt_head() -> tuple[Node, dict]:
    x, t = ht.placeholder("x", (4, 64, 128)), ht.placeholder("t", (4, 64), "int64")
    h = nn.LayerNorm(128)(nn.TransformerBlock(128, 4, dropout=0.1)(x))
    return ht.mean(ht.softmax_cross_entropy(nn.Linear(128, 2000, bias=False)(h), t)), optim.Adam(1e-3)


def resnet_block(channels: int = 16, size: int = 16) -> tuple[Node, dict]:
    x, t = ht.placeholder("x", (8, channels, size, size)), ht.placeholder("t", (8,), "int64")
    first, second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
    h = nn.BatchNorm(channels)(second(ht.relu(nn.BatchNorm(channels)(first(x)))))
    logits = nn.Linear(channels, 10)(ht.global_avg_pool2d(ht.relu(x + h)))
    return ht.mean(ht.softmax_cross_entropy(logits, t)), optim.Momentum(0.1)


def passes_without(*left_out: str) -> list[str]:
    return [run.__name__ for run in chosen_passes(None, "gpu") if run.__name__ not in left_out]


def program(model, precision: str, *left_out: str):
    """The program of a training step, as the stand-in for a GPU gets it, without some of the passes."""
    passes = passes_without(*left_out)
    with fake_cupy.installed(), ht.scope("model"):
        loss, optimizer = model()
        run = ht.Executor([loss, optimizer.minimize(loss)], device="gpu", precision=precision, passes=passes)
        feed = {n: np.zeros(n.shape, n.dtype) for n in run.subgraphs["default"].placeholders.values()}
        return run.program(feed)


def cost(made) -> tuple[int, int]:
    """Calls, and bytes that they read and write: of kernels their arrays, of CuPy's functions what their nodes need.

    So do kernels that find their arrays in a table.
    """
    total = 0
    for step in made.steps:
        launches = [call for call in step.calls if isinstance(call, partial) and not hasattr(call, "arrays")]
        arrays = [call.args[2] for call in launches if len(call.args) == 3]
        kernels = [a for a in arrays if isinstance(a, tuple)]
        total += sum(a.nbytes for group in kernels for a in group if isinstance(a, np.ndarray))
        total += 0 if kernels else traffic(step.node)
        total += 2 * step.out.nbytes if step.node.op.name == "linear" else 0
    return len(made.calls), total


MODELS = {"mlp": mlp, "gpt block": gpt_block, "gpt head": gpt_head, "resnet block": resnet_block}
SAVED = {  # at least so many launches and bytes
    ("mlp", "float32"): (1, 4_138_000),
    ("mlp", "float16"): (19, 4_179_000),
    ("mlp", "bfloat16"): (6, 4_179_000),
    ("gpt block", "float32"): (2, 3_035_000),
    ("gpt block", "float16"): (32, 5_197_000),
    ("gpt block", "bfloat16"): (20, 5_197_000),
    ("gpt head", "float32"): (1, 2_755_000),
    ("gpt head", "float16"): (35, 13_108_000),
    ("gpt head", "bfloat16"): (23, 13_108_000),
    ("resnet block", "float32"): (13, 1_000),
    ("resnet block", "float16"): (37, 587_000),
    ("resnet block", "bfloat16"): (20, 586_000),
}


MOST = {  # at most so many launches and bytes, and bytes of the arena
    ("mlp", "float32"): (22, 39_010_000, 3_204_000),
    ("mlp", "float16"): (30, 34_143_000, 2_263_000),
    ("mlp", "bfloat16"): (28, 32_801_000, 2_266_000),
    ("gpt block", "float32"): (46, 24_974_000, 2_629_000),
    ("gpt block", "float16"): (56, 17_777_000, 2_038_000),
    ("gpt block", "bfloat16"): (53, 17_377_000, 1_907_000),
    ("gpt head", "float32"): (52, 48_448_000, 5_439_000),
    ("gpt head", "float16"): (63, 35_370_000, 3_509_000),
    ("gpt head", "bfloat16"): (60, 34_457_000, 3_824_000),
    ("resnet block", "float32"): (40, 5_137_000, 658_000),
    ("resnet block", "float16"): (47, 3_116_000, 399_000),
    ("resnet block", "bfloat16"): (45, 3_106_000, 399_000),
}


@pytest.mark.parametrize(("model", "precision"), SAVED)
@pytest.mark.sampled(8)
def test_a_training_step_launches_less_and_moves_less(model, precision):
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    made = program(MODELS[model], precision)
    together = cost(made)
    assert all(
        got <= most for got, most in zip((*together, made.plan.arena_bytes), MOST[model, precision], strict=True)
    )
    alone = cost(program(MODELS[model], precision, "fuse_kernels"))
    fewer, less = SAVED[model, precision]
    assert alone[0] - together[0] >= fewer and alone[1] - together[1] >= less


@compiled
def test_training_on_the_stand_in_is_that_on_the_cpu():
    """Groups with several results that overwrite their operands and variables, in whole programs."""
    rng = np.random.default_rng(0)
    feed = {"x": rng.standard_normal((8, 4, 6, 6), np.float32), "t": rng.integers(0, 10, 8)}
    with fake_cupy.installed(), ht.scope("model"):
        loss, optimizer = resnet_block(4, 6)
        entries = [loss, optimizer.minimize(loss)]
        here, there = ht.Executor(entries), ht.Executor(entries, device="gpu")
        for _ in range(2):
            np.testing.assert_allclose(here.run(feed)[0], there.run(feed)[0], rtol=1e-4)
        fused = [s.node for s in there.program(feed).steps if s.node.op.name == "fused"]
        assert any(isinstance(n.type, tuple) and (n, 0) in there.program(feed).plan.donated for n in fused)
        for name, value in here.state.items():
            np.testing.assert_allclose(there.state[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
