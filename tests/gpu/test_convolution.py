"""Convolution on tensor cores: its kernels over odd shapes, what they leave out, and mistakes that have to show."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.core.simplify import interpret
from hetu.cpu_kernels.compiler import compiler
from hetu.gpu_kernels import convolution, emulator, images, source
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.gpu_kernels.machine import RecordingMachine
from hetu.passes import channels_last, chosen_passes
from hetu.passes.channels_last import CONVOLUTIONS

from ..at_once import chosen
from . import fake_cupy, proofs
from .fake_streams import LOG
from .test_attention import names

compiled = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
DIGITS = {"float16": 1e-3, "float32": 4e-7, "float64": 1e-12}  # of the largest value
PLAIN = {"dilation": (1, 1), "groups": 1}
ONE = ((1, 1), (1, 1))
NONE = ((0, 0), (0, 0))
FIRST, ALL_LAST = (0, 1, 2, 3), (2, 3, 0, 1)
PLAIN = {"dilation": (1, 1), "groups": 1}
NAMES = ("conv2d_last", "conv2d_last_dx", "conv2d_last_dw")

# Rows, columns, images, channels, results, taps each way, stride and padding.
SHAPES = {
    "plain": (5, 4, 3, 16, 24, (3, 3), (1, 1), ONE),
    "strided": (7, 6, 3, 24, 16, (3, 3), (2, 2), ONE),
    "points": (5, 6, 3, 16, 24, (1, 1), (1, 1), NONE),
    "sparse points": (5, 6, 3, 16, 24, (1, 1), (2, 2), NONE),
    "uneven": (5, 5, 5, 40, 72, (3, 2), (2, 1), ((2, 1), (0, 2))),
    "wide": (7, 5, 2, 8, 8, (7, 7), (2, 2), ((3, 3), (3, 3))),
    "frame": (2, 3, 2, 8, 16, (3, 2), (1, 1), ((3, 3), (2, 4))),
    "stride beyond taps": (7, 7, 2, 8, 8, (2, 2), (3, 3), ((1, 0), (0, 1))),
    "one image": (6, 6, 1, 32, 8, (3, 3), (1, 1), ONE),
    "neighbors": (3, 20, 4, 8, 8, (3, 3), (1, 1), ONE),
    "many images": (2, 2, 70, 8, 8, (3, 3), (1, 1), ONE),
}


def arrays(shape, dtype, seed=0):
    """x, w, g and the attributes of each operator beside them."""
    h, w, n, c, o, taps, stride, padding = shape
    rng, attrs = np.random.default_rng(seed), {"stride": stride, "padding": padding, **PLAIN}
    x, k = (rng.standard_normal(s).astype(dtype) for s in ((h, w, n, c), (o, c, *taps)))
    y = OPS["conv2d_last"].forward(np, x.astype(float), k.astype(float), **attrs)
    g = rng.standard_normal(y.shape).astype(dtype)
    return {
        "conv2d_last": ((x, k), attrs),
        "conv2d_last_dx": ((g, k), {"size": (h, w), **attrs}),
        "conv2d_last_dw": ((x, g), {"kernel": taps, **attrs}),
    }


def computed(machine, name, inputs, attrs):
    """What the calls of a machine write over 77, and what is wanted, in float64."""
    wanted = OPS[name].forward(np, *(a.astype(np.float64) for a in inputs), **attrs)
    out = machine.xp.full(wanted.shape, 77, inputs[0].dtype)
    for call in bound(machine, OPS[name], out, [machine.xp.asarray(a) for a in inputs], attrs):
        call()
    return out, wanted


def compare(shape, dtype, names=NAMES, capability=90):
    machine = Emulator()
    machine.capability = capability
    for name in names:
        made, wanted = computed(machine, name, *arrays(shape, dtype)[name])
        np.testing.assert_allclose(made, wanted, rtol=0, atol=DIGITS[dtype] * np.abs(wanted).max(), err_msg=name)


def launched(name, inputs, attrs, capability=90):
    """The names of the kernels, their grids and blocks, and how often CuPy works beside them; None without kernels."""
    machine, seen = RecordingMachine(), []
    machine.capability = capability
    machine.kernel = lambda text, name: lambda grid, block, arguments: seen.append((name, grid, block))
    out = np.zeros(OPS[name].forward(np, *inputs, **attrs).shape, inputs[0].dtype)
    calls = bound(machine, OPS[name], out, inputs, attrs)
    if calls is None:
        return None
    with np.errstate(all="ignore"):  # as nothing was computed
        for call in calls:
            call()
    return [name for name, *_ in seen], seen, len(calls) - len(seen)


def nightly_unless(now, *case):
    return pytest.param(*case, marks=() if now else pytest.mark.nightly)


@compiled
@pytest.mark.parametrize(
    ("shape", "dtype", "capability"),  # float32 takes three products for one, and those of warpgroups on a Hopper
    [
        nightly_unless(d == "float16" or k % 4 == j, s, d, c)
        for j, (d, c) in enumerate([("float16", 80), ("float32", 80), ("float32", 90)])
        for k, s in enumerate(SHAPES)
    ],
)
@pytest.mark.sampled(8)
def test_kernels(shape, dtype, capability):
    compare(SHAPES[shape], dtype, capability=capability)


@pytest.mark.sampled(3)
@compiled
@pytest.mark.parametrize(
    ("tile", "dtype"),
    [
        *(
            nightly_unless(k == j, tile, dtype)
            for k, tile in enumerate(convolution.TILES[:2])
            for j, dtype in enumerate(["float32", "float16"])
        ),
        (convolution.GROUP_TILES[0], "float32"),
    ],
)
def test_large_tiles(tile, dtype, monkeypatch):
    monkeypatch.setattr(convolution, "BUSY", 1)
    monkeypatch.setattr(convolution, "_tiles", lambda *_: (tile, convolution.TILES[-1]))
    compare((4, 3, 12, 72, 72, (2, 1), (1, 1), NONE), dtype)


@compiled
def test_bfloat16(monkeypatch):
    """NumPy has no bfloat16: its bits travel as 16-bit integers."""
    text = convolution.text
    monkeypatch.setattr(convolution, "DTYPES", ("uint16",))
    monkeypatch.setattr(convolution, "text", lambda _, *sizes: text("bfloat16", *sizes))
    for name, (inputs, attrs) in arrays(SHAPES["strided"], "float32").items():
        bits = [(a.view(np.uint32) + 0x8000 >> 16).astype(np.uint16) for a in inputs]
        rounded = [(b.astype(np.uint32) << 16).view(np.float32) for b in bits]
        wanted = OPS[name].forward(np, *rounded, **attrs)
        made = np.zeros(wanted.shape, np.uint16)
        for call in bound(Emulator(), OPS[name], made, bits, attrs):
            call()
        made = (made.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(made, wanted, rtol=0, atol=2**-8 * np.abs(wanted).max(), err_msg=name)


@compiled
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("channels", [(3, 8), (5, 16), (16, 5)])
@pytest.mark.sampled(8)
def test_channels_that_make_no_chunks(channels, dtype):
    """A few channels are unfolded, in images of any strides; what is left is CuPy's."""
    shape = (5, 6, 3, *channels, (3, 2), (2, 1), ((1, 1), (0, 1)))
    for name, (inputs, attrs) in arrays(shape, dtype).items():
        first = np.ascontiguousarray(inputs[0].transpose(2, 3, 0, 1)).transpose(2, 3, 0, 1)
        unfolded = dtype != "float64" and channels[1] > 5 and name != "conv2d_last_dx"
        kernels = launched(name, (first, inputs[1]), attrs)
        if not unfolded:
            assert kernels is None
            continue
        made, wanted = computed(Emulator(), name, (first, inputs[1]), attrs)
        digits = 4e-3 if dtype == "float16" else DIGITS[dtype]
        np.testing.assert_allclose(made, wanted, rtol=0, atol=digits * np.abs(wanted).max(), err_msg=name)
        assert "patches" in kernels[0] and "convolve" in "".join(kernels[0])


def test_launches():
    """Weights in the order of a product, the product, and for strides one for each class of pixels."""
    for label, wanted in {
        "plain": (["arrange", "convolve"], ["arrange", "convolve"], ["convolve_dw", "join_parts"]),
        "points": (["convolve"], ["arrange", "convolve"], ["convolve_dw", "join_parts"]),
        "strided": (["arrange", "convolve"], ["arrange"] + ["convolve"] * 4, ["convolve_dw", "join_parts"]),
    }.items():
        found = [launched(name, *of)[0] for name, of in arrays(SHAPES[label], "float32").items()]
        assert found == [*wanted], label


def test_devices_without_these_products_leave_them_to_cupy():
    for name, of in arrays(SHAPES["plain"], "float32").items():
        assert launched(name, *of, capability=75) is None


@pytest.mark.parametrize(
    ("places", "results", "tile"),
    [
        (131072, 64, (128, 64)),
        (32768, 128, (128, 128)),
        (8192, 256, (128, 128)),
        (2048, 512, (128, 64)),
        (512, 512, (64, 64)),
        (100, 8, (64, 64)),
    ],
)
def test_tiles_are_as_large_as_there_are_enough_of(places, results, tile):
    assert convolution._tile(convolution.TILES, places, results)[:2] == tile


def test_no_matrix_of_columns_lies_in_memory():
    """A layer of ResNet-18 for 32 images: all that it needs are the weights again."""
    x, w = np.empty((32, 32, 32, 64), np.float32), np.empty((64, 64, 3, 3), np.float32)
    attrs, sizes = {"stride": (1, 1), "padding": ONE, **PLAIN}, []

    class Counting:
        @staticmethod
        def empty(shape, dtype):
            sizes.append(int(np.prod(shape)) * np.dtype(dtype).itemsize)
            return np.empty(shape, dtype)

    machine = RecordingMachine()
    machine.xp = Counting
    assert len(convolution.conv2d_last(machine, np.empty_like(x), x, w, **attrs)) == 2 and sizes == [w.nbytes]


@compiled
def test_taps_that_no_pixel_of_a_block_meets_are_left_out():
    """Their weights are NaN, which times a zero of the frame would be seen."""
    x = np.random.default_rng(0).standard_normal((2, 2, 64, 8)).astype(np.float16)
    w = np.full((8, 8, 7, 7), np.nan, np.float16)
    w[:, :, 2:5, 2:5] = 1
    attrs = {"stride": (1, 1), "padding": ((3, 3), (3, 3)), **PLAIN}
    out = np.zeros_like(x)
    for call in bound(Emulator(), OPS["conv2d_last"], out, (x, w), attrs):
        call()
    np.testing.assert_allclose(out, np.broadcast_to(x.astype(float).sum((0, 1, 3))[:, None], out.shape), atol=0.02)


@compiled
@pytest.mark.parametrize("capability", [80, 90])
def test_float32_is_not_rounded_to_what_tensor_cores_multiply(capability):
    """As exact as NumPy, where 11 bits would be off by 3e-4; sums of one sign show a rounding to one side."""
    shape, machine = (4, 4, 4, 64, 16, (3, 3), (1, 1), ONE), Emulator(["ascending"])
    machine.capability = capability
    for name, (inputs, attrs) in arrays(shape, "float32").items():
        made, wanted = computed(machine, name, [np.abs(a) for a in inputs], attrs)
        assert np.abs(made / wanted - 1).max() < 5e-7, name


@compiled
@pytest.mark.parametrize("order, slopes", [(ALL_LAST, ALL_LAST), (ALL_LAST, FIRST), (FIRST, ALL_LAST)])
def test_pooling_takes_either_layout(order, slopes):
    """Images and what is read for their gradient, each with the channels first or last."""
    attrs = {"kernel": (3, 2), "stride": (2, 2), "padding": ((1, 1), (0, 1))}
    x = np.random.default_rng(0).standard_normal((2, 5, 6, 7))
    made = OPS["max_pool2d"].forward(np, x, **attrs)
    read = [np.ascontiguousarray(a.transpose(slopes)).transpose(slopes) for a in made]
    wanted = OPS["max_pool2d_dx"].forward(np, *read, size=(6, 7), **attrs)
    out = np.full([x.shape[k] for k in order], np.nan).transpose(order)
    calls = images.max_pool2d_dx(Emulator(), out, *read, size=(6, 7), **attrs)
    for call in calls:
        call()
    assert len(calls) == (3 if order != slopes else 1)
    np.testing.assert_allclose(out, wanted, atol=1e-12)


# -- the pass ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DIGITS)
def test_the_pass_takes_every_float_on_both_kinds_of_device(dtype):
    assert channels_last in chosen_passes(None, "gpu")
    assert (channels_last in chosen_passes(None)) == (compiler() is not None)
    x, w = ht.placeholder("x", (2, 3, 5, 4), dtype), ht.placeholder("w", (16, 3, 3, 3), dtype)
    outputs = [ht.conv2d(x, w, padding=1)]
    made = channels_last(outputs)
    assert "conv2d_last" in names(made) and made[0].type == outputs[0].type
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal(n.shape).astype(dtype) for n in (x, w)}
    (before,), (after,) = interpret(outputs, feed), interpret(made, feed)
    np.testing.assert_allclose(after, before, rtol=0, atol=4 * DIGITS[dtype] * np.abs(before).max())


def test_the_pass_leaves_alone_what_is_not_for_it():
    x, few = ht.placeholder("x", (2, 4, 9, 9)), ht.placeholder("few", (8, 4, 3, 3))
    outputs = (ht.conv2d(x, few), ht.conv2d(x, few, dilation=2))
    assert channels_last(outputs) == outputs


@pytest.mark.parametrize("groups", [1, 2, 16])
def test_the_pass_takes_groups_and_dilations(groups):
    x, w = ht.placeholder("x", (2, 16, 9, 8), "float64"), ht.placeholder("w", (16, 16 // groups, 3, 3), "float64")
    y = ht.relu(ht.conv2d(x, w, stride=2, padding=2, dilation=2, groups=groups))
    outputs = [y, *ht.gradients(ht.sum(y * y), [x, w])]
    made = channels_last(outputs)
    assert {"conv2d_last", "conv2d_last_dx", "conv2d_last_dw"} <= set(names(made))
    assert not {op.name for op in CONVOLUTIONS} & set(names(made))
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal(n.shape) for n in (x, w)}
    for before, after in zip(interpret(outputs, feed), interpret(made, feed), strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-12 * np.abs(before).max())


# -- training on the stand-in for CuPy ---------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@compiled
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_training_runs_the_kernels(precision):
    """A step of a small residual network: every convolution by these kernels, and no copies between them."""
    with fake_cupy.installed():
        LOG.clear()
        ops = proofs.convolution(precision)
    assert ops["conv2d_last"] == ops["conv2d_last_dw"] == 4 and ops["conv2d_last_dx"] == 3
    assert not {"conv2d", "conv2d_dx", "conv2d_dw", "permute_dims"} & set(ops)
    runs = Counter(line for line in LOG if line.startswith("kernel"))
    # a stride makes four products of one; the first layer's images are unfolded, twice, and its weights widened
    assert runs["kernel convolve"] == 2 * (4 + 1 + 4 + 4) and runs["kernel convolve_dw"] == 2 * 4
    assert runs["kernel patches"] == 2 * 3 and runs["kernel arrange"] == 2 * (2 + 3)


# -- mistakes ----------------------------------------------------------------------------------------------------------

FORWARD, WEIGHTS, HOPPER = "conv2d_last", "conv2d_last_dw", "float32 of warpgroups"
MISTAKES = [
    *((name, "        __syncthreads();  // this tile", "  // this tile", "float16") for name in (FORWARD, WEIGHTS)),
    (FORWARD, "        wait_for_groups<STAGES - 2>();\n", "", "float16"),
    (FORWARD, "wait_for_groups<STAGES - 2>", "wait_for_groups<STAGES - 1>", "float16"),
    (FORWARD, "load(next);", "load(now);", "float16"),
    (FORWARD, "if (c - chunk * EACH >= channels)", "if (c >= channels)", "float16"),
    (FORWARD, "least(taps, size - lowest)", "least(taps, size - lowest - 1)", "float16"),
    (FORWARD, "most(0, -highest)", "most(0, 1 - highest)", "float16"),
    (FORWARD, "(unsigned)(v[k] + j) < column_size", "(unsigned)(v[k] + j) <= column_size", "float16"),
    (FORWARD, "if (place >= places) continue;", "if (place > places) continue;", "float16"),
    (FORWARD, "if (o < results) store", "if (o <= results) store", "float16"),
    (FORWARD, "&right[place][r][chunk ^ along(r)]", "&right[place][r][chunk]", "float16"),
    (FORWARD, "(k * 2 + lane / 16) ^ along(r)", "(k * 2 + lane / 16)", "float16"),
    (FORWARD, "b[2 * n + i / 2][i % 2] = both[i]", "b[2 * n + i % 2][i / 2] = both[i]", "float16"),
    (FORWARD, "multiply_add(part, left_rest[m], right[n], S());", "", "float32"),
    (FORWARD, "            pixel[k] += DEPTH;\n", "", "float16"),
    (FORWARD, "            weight[k] += DEPTH;\n", "", "float16"),
    (WEIGHTS, "has_slope && at[k] < count", "has_slope", "float16"),
    (WEIGHTS, "slope[k] += DEPTH * results", "slope[k] += DEPTH", HOPPER),
    (WEIGHTS, "? (step - 1 - shift) / step", "? -shift / step", "float16"),
    (WEIGHTS, "k * 8 + i / 2 * 4 + lane % 4", "k * 8 + i % 2 * 4 + lane % 4", "float32"),
    (WEIGHTS, "v[k] = sides.begin, u[k]++", "v[k] = sides.begin", "float16"),
    (WEIGHTS, "k < splits; k++", "k < 1; k++", "float16"),
    (FORWARD, "multiply_group(part, rest[k], &high->row[0][2 * k], k > 0);", "", HOPPER),
    (FORWARD, "&high->row[0][2 * k], k > 0", "&high->row[0][2 * k], true", HOPPER),
    (FORWARD, "left[k], &low->row", "left[k], &high->row", HOPPER),
    (FORWARD, "    __syncthreads();\n    float part", "    float part", HOPPER),
    (FORWARD, "    begin_products();\n", "", HOPPER),
    (FORWARD, "    show_to_products();\n", "", HOPPER),
    (FORWARD, "    end_products(part);\n", "", HOPPER),
    (WEIGHTS, "chunk ^ along(column), whole", "chunk, whole", HOPPER),
]
TEXT = convolution.text.__wrapped__  # not the one kept for all launches
PROBE = (4, 3, 22, 40, 24, (3, 2), (2, 1), ((1, 1), (1, 1)))


def changed(right, wrong, kind):
    """The text of tiles of 64 x 64 with one change."""
    original, tiles = source.file_text, convolution.GROUP_TILES if kind == HOPPER else convolution.TILES
    of = (kind.split()[0], "int32", tiles[-1])
    assert right in TEXT(*of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "file_text", lambda name: original(name).replace(right, wrong))
        return TEXT(*of)


@pytest.fixture(scope="module")
def prepared(request):
    """The texts of the chosen mistakes, compiled together, which takes far less time than one by one."""
    emulator.prepare(changed(*case["mistake"][1:]) for case in chosen(request, test_a_mistake_shows))


@cache
def check_unchanged(name, kind):
    compare(PROBE, kind.split()[0], [name], 90 if kind == HOPPER else 80)


@compiled
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m[0]}, {m[1].strip()[:40]}")
@pytest.mark.sampled(16)
def test_a_mistake_shows(mistake, monkeypatch):
    name, *change, kind = mistake
    monkeypatch.setattr(convolution, "LEAST_STEPS", 2)
    check_unchanged(name, kind)
    monkeypatch.setattr(convolution, "text", lambda *_: changed(*change, kind))
    with pytest.raises((AssertionError, source.KernelError)):
        check_unchanged.__wrapped__(name, kind)
