"""16-bit training reaches what float32 reaches; the loss scale saves small gradients and steps that overflow."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest

import hetu as ht
from hetu import nn
from hetu.core import types
from hetu.core.errors import ArgumentError, DTypeError, MissingDependencyError
from hetu.core.graph import OPS, topological
from hetu.core.simplify import interpret, simplify
from hetu.dist import DataParallel, run_ranks
from hetu.passes import mixed_precision as lowered
from hetu.passes.mixed_precision import FIRST_SCALE, PATIENCE

RNG = np.random.default_rng(0)
CENTERS = RNG.standard_normal((4, 64)).astype("float32")
T = RNG.integers(0, 4, 256)
X = (CENTERS[T] + RNG.standard_normal((256, 64))).astype("float32")


def mlp(x):
    return nn.Linear(32, 4)(ht.relu(nn.Linear(64, 32)(x)))


def cnn(x):
    images = ht.reshape(x, shape=(x.shape[0], 1, 8, 8))
    h = ht.max_pool2d(ht.relu(nn.BatchNorm(8)(nn.Conv2d(1, 8, 3)(images))), 2)
    return nn.Linear(72, 4)(ht.reshape(h, shape=(x.shape[0], -1)))


def trained(model, precision, epochs=3, **options):
    with ht.scope("model"):
        x, t = ht.placeholder("x", (None, 64)), ht.placeholder("t", (None,), "int64")
        y = model(x)
        updates = ht.optim.Adam(3e-3, clip_norm=1.0).minimize(ht.mean(ht.softmax_cross_entropy(y, t)))
    executor = ht.Executor({"train": [updates], "eval": [y]}, precision=precision, **options)
    for _ in range(epochs):
        for i in range(0, 256, 32):
            executor.run("train", {x: X[i : i + 32], t: T[i : i + 32]})
    return executor, float((executor.run("eval", {x: X})[0].argmax(1) == T).mean())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", [mlp, cnn])
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_it_reaches_the_accuracy_of_float32(model, precision):
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    single, mixed = trained(model, "float32"), trained(model, precision)
    assert single[1] > 0.8
    assert abs(single[1] - mixed[1]) <= 0.02
    state = mixed[0].state
    assert {value.dtype.name for value in state.values()} <= {"float32", "int64", "uint64"}
    assert ("loss_scale" in state) == (precision == "float16")
    for name, value in single[0].state.items():
        np.testing.assert_allclose(state[name], value, atol=0.05, err_msg=name)


def test_products_take_16_bits_and_all_else_keeps_32():
    x, w = ht.placeholder("x", (8, 6)), ht.variable("w", np.ones((6, 4), "float32"))
    b = ht.variable("b", np.zeros(4, "float32"))
    y = ht.softmax(ht.relu(x @ w) + b)
    (made,), _ = lowered([y], {}, [], "float16")
    dtypes = {n.op.name: n.dtype.name for n in topological([made]) if n.inputs and n.op.name != "astype"}
    assert dtypes == {"matmul": "float16", "relu": "float16", "add": "float16", "softmax": "float32"}
    assert made.type == y.type


def test_images_of_a_batch_norm_follow_their_convolution_and_its_vectors_do_not():
    pytest.importorskip("ml_dtypes")
    x, w = ht.placeholder("x", (4, 3, 5, 5)), ht.variable("w", RNG.standard_normal((6, 3, 3, 3)).astype("float32"))
    scale, bias = (ht.variable(n, np.ones(6, "float32")) for n in ("scale", "bias"))
    y, mean, _ = OPS["batch_norm_train"](ht.conv2d(x, w), scale, bias)
    y = ht.relu(y)
    made = simplify(lowered([y, mean, *ht.gradients(ht.sum(y * y), [x, scale])], {}, [], "bfloat16")[0])
    norms = {n.op.name: n for n in topological(made)}
    for name, images in {"batch_norm_train": 1, "batch_norm_dx": 2}.items():
        assert [i.dtype.name for i in norms[name].inputs[:images]] == ["bfloat16"] * images
        assert {i.dtype.name for i in norms[name].inputs[images:]} == {"float32"}
        assert [t.dtype.name for t in norms[name].type] == ["bfloat16", "float32", "float32"]
    assert {n.dtype.name for n in topological(made) if n.op.name == "relu"} == {"bfloat16"}


@pytest.mark.parametrize("parts", [False, True])
def test_a_batch_norm_of_16_bits_sums_up_in_those_of_its_scale(parts):
    """In its own operators too, which take its place where the batch is split."""
    x, g = (RNG.standard_normal((2, 600, 3)) + 30).astype("float16")
    scale, bias = RNG.standard_normal((2, 3)).astype("float32")
    mean, var = x.astype("float32").mean(0), x.astype("float32").var(0)
    for name, arrays in (("batch_norm_train", (x, scale, bias)), ("batch_norm_dx", (g, x, scale, mean, var))):
        nodes = [ht.placeholder(f"x{k}", a.shape, a.dtype) for k, a in enumerate(arrays)]
        op = OPS[name]
        made = op.decompose_rule(*nodes, axis=1, epsilon=1e-5) if parts else op(*nodes)
        assert [n.dtype.name for n in made] == ["float16", "float32", "float32"]
        wanted = op.forward(np, *(a.astype("float64") for a in arrays), axis=1)
        for got, right in zip(interpret(list(made), dict(zip(nodes, arrays))), wanted):
            digits = 2e-3 if got.dtype == np.float16 else 2e-5
            np.testing.assert_allclose(got, right, rtol=digits, atol=digits * abs(right).max())


NORMS = {  # their operands: images, vectors of the model, and vectors that are computed
    "batch_norm_train": ("images", "scale", "bias"),
    "batch_norm_dx": ("images", "images", "scale", "computed", "computed"),
    "layer_norm": ("images", "scale", "bias"),
    "layer_norm_dx": ("images", "images", "scale"),
    "rms_norm": ("images", "scale"),
    "rms_norm_dx": ("images", "images", "scale"),
}
DIGITS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-9}


def meet(*dtypes):
    """Whether one holds them all: for both kinds of 16 bits later versions of ml_dtypes have float32."""
    try:
        return np.result_type(*dtypes)
    except np.exceptions.DTypePromotionError:
        return None


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norms_take_floats_of_any_dtypes_beside_one_another(name, parts):
    """Squares beyond float16 are computed in float32 at least; the two kinds of 16 bits may have nowhere to meet."""
    op, rng = OPS[name], np.random.default_rng(0)  # its own: rows that are nearly constant have few digits
    given = {kind: rng.uniform(1, 2, (40, 6)[kind != "images" :]) for kind in dict.fromkeys(NORMS[name])}
    given["images"] *= 1 if name.endswith("dx") else 6000
    for dtypes in product(DIGITS if find_spec("ml_dtypes") else DIGITS.keys() - {"bfloat16"}, repeat=len(given)):
        of = dict(zip(given, map(types.as_dtype, dtypes)))
        arrays = [given[kind].astype(of[kind]) for kind in NORMS[name]]
        nodes = [ht.placeholder(f"x{k}", a.shape, a.dtype) for k, a in enumerate(arrays)]
        if not meet(*of.values()):
            with pytest.raises(DTypeError, match="no dtype holds both .*float16"):
                op(*nodes)
            continue
        made = op(*nodes)
        root = made if isinstance(made, ht.Node) else made[0].inputs[0]
        found = op.decompose_rule(*nodes, **root.attrs) if parts else made
        wanted = op.forward(np, *(a.astype("float64") for a in arrays), **root.attrs)
        made, found, wanted = ([v] if not isinstance(v, tuple) else list(v) for v in (made, found, wanted))
        for node, got, right in zip(made, interpret(found, dict(zip(nodes, arrays))), wanted, strict=True):
            assert node.dtype == got.dtype, (dtypes, node)
            digits = DIGITS[got.dtype.name]
            np.testing.assert_allclose(got.astype("float64"), right, rtol=digits, atol=digits * abs(right).max())


def test_a_weight_and_its_transpose_share_one_cast():
    x, w = ht.placeholder("x", (8, 6)), ht.variable("w", np.ones((6, 4), "float32"))
    y = x @ w
    made = simplify(lowered([y, y @ ht.matrix_transpose(w), y @ ht.permute_dims(w, axes=(1, 0))], {}, [], "float16")[0])
    casts = [n for n in topological(made) if n.op.name == "astype" and n.dtype == np.float16]
    assert [n.inputs[0] for n in casts] == [x, w]
    feed = {x: RNG.standard_normal(x.shape).astype("float32"), w: RNG.standard_normal(w.shape).astype("float32")}
    half = {n: v.astype("float16") for n, v in feed.items()}
    first = half[x] @ half[w]
    for value, wanted in zip(interpret(made, feed), (first, first @ half[w].T, first @ half[w].T)):
        np.testing.assert_array_equal(value, wanted.astype("float32"))


def test_rows_and_their_batch_share_one_cast():
    """A product by a matrix takes a batch as it is, and its gradient as rows."""
    x, w = ht.placeholder("x", (2, 3, 4)), ht.variable("w", np.ones((4, 5), "float32"))
    h = ht.layer_norm(x, np.ones(4, "float32"), np.zeros(4, "float32"))
    y = ht.softmax(h @ w)
    made = simplify(lowered([y, *ht.gradients(ht.sum(y * y), [w])], {}, [], "float16")[0])
    casts = [n.inputs[0].op.name for n in topological(made) if n.op.name == "astype" and n.dtype == np.float16]
    assert casts == ["layer_norm", "variable", "subtract"]  # the last of which is the gradient of y


def linear(scale=1.0):
    """w = (1, 2), the gradient of the loss is `scale` x (1, 1)."""
    w = ht.variable("w", np.array([1.0, 2.0], "float32"))
    x = ht.placeholder("x", (2, 1))
    loss = ht.sum(ht.reshape(w, shape=(1, 2)) @ x) * scale
    return w, loss, {"x": np.ones((2, 1), "float32")}


def test_a_step_that_overflows_changes_nothing_and_halves_the_scale():
    _, loss, feed = linear()
    executor = ht.Executor([ht.optim.Adam(0.1).minimize(loss)], precision="float16")
    before = dict(executor.state)
    executor.state["loss_scale"] = 2.0**20  # beyond the largest float16, 65504
    executor.run(feed)
    for name in before:
        if name != "loss_scale":
            np.testing.assert_array_equal(executor.state[name], before[name], err_msg=name)
    assert executor.state["loss_scale"] == 2.0**19
    for _ in range(5):
        executor.run(feed)
    assert executor.state["loss_scale"] == 2.0**15 and executor.state["loss_scale/good_steps"] == 1
    assert executor.state["w"][0] != before["w"][0]


def test_the_scale_doubles_after_enough_good_steps():
    _, loss, feed = linear()
    executor = ht.Executor([ht.optim.SGD(0.1).minimize(loss)], precision="float16")
    executor.state["loss_scale"], executor.state["loss_scale/good_steps"] = 256.0, PATIENCE - 2
    seen = []
    for _ in range(3):
        executor.run(feed)
        seen.append((float(executor.state["loss_scale"]), int(executor.state["loss_scale/good_steps"])))
    assert seen == [(256.0, PATIENCE - 1), (512.0, 0), (512.0, 1)]


@pytest.mark.parametrize(("scale", "arrives"), [(FIRST_SCALE, True), (1.0, False)])
def test_scaling_is_what_saves_small_gradients(scale, arrives):
    _, loss, feed = linear(scale=1e-8)  # the least float16 above 0 is 6e-8
    executor = ht.Executor([ht.optim.SGD(1e7).minimize(loss)], precision="float16")
    executor.state["loss_scale"] = scale
    executor.run(feed)
    np.testing.assert_allclose(executor.state["w"], [0.9, 1.9] if arrives else [1.0, 2.0], rtol=1e-2)


def test_fetched_gradients_and_their_norms_are_unscaled():
    w, loss, feed = linear()
    updates = ht.optim.SGD(0.1).minimize(loss)
    g = updates.gradients[w]
    values = ht.Executor([loss, g, ht.sum(g * g), updates], precision="float16").run(feed)
    assert [np.ravel(v).tolist() for v in values[:3]] == [[3.0], [1.0, 1.0], [2.0]]


def test_a_gradient_inside_of_the_loss_is_not_scaled():
    def run(precision):
        w, loss, feed = linear(scale=1.0)
        (inner,) = ht.gradients(loss * loss, [w])  # = 2 (w0 + w1) (1, 1)
        updates = ht.optim.SGD(0.01).minimize(ht.sum(inner * inner))
        executor = ht.Executor([updates], precision=precision)
        if precision == "float16":
            executor.state["loss_scale"] = 64.0  # the square of a scaled gradient would show
        executor.run(feed)
        return executor.state["w"]

    np.testing.assert_allclose(run("float16"), run("float32"), rtol=1e-2)


def test_checkpoint_goes_on_bit_for_bit(tmp_path):
    one, _ = trained(mlp, "float16", epochs=1)
    one.save(tmp_path / "state")
    other, _ = trained(mlp, "float16", epochs=0)
    other.load(tmp_path / "state")
    for executor in (one, other):
        executor.run("train", {"x": X[:32], "t": T[:32]})
    for name, value in one.state.items():
        np.testing.assert_array_equal(other.state[name], value, err_msg=name)


def test_two_ranks_train_as_one():
    alone = dict(trained(mlp, "float16", epochs=1)[0].state)
    for found in run_ranks(
        2, lambda comm: dict(trained(mlp, "float16", epochs=1, strategy=DataParallel(), comm=comm)[0].state)
    ):
        assert found["loss_scale/good_steps"] == alone["loss_scale/good_steps"] == 8
        for name, value in alone.items():
            np.testing.assert_allclose(found[name], value, atol=2e-3, err_msg=name)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_a_query_that_sees_nothing_weighs_all_evenly(precision, kind):
    """Also where the scores are masked in 16 bits, in which the number that hides a key must be finite too."""
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    x, mask = ht.placeholder("x", (None, 6, 8)), ht.placeholder("mask", (6, 6), kind)
    y = ht.scaled_dot_product_attention(x, x, x[:, :, :3] if kind == "bool" else x, mask)
    values, seen = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("f"), np.tri(6, k=-1, dtype=bool)
    feed = {x: values, mask: seen if kind == "bool" else np.where(seen, 0, -np.inf)}
    for passes in (None, []):
        (got,) = ht.Executor([y], precision=precision, passes=passes).run(feed)
        np.testing.assert_allclose(got[:, 0], values[..., : got.shape[-1]].mean(1), atol=2e-2)


FAR = (-np.inf, np.finfo("f").min, -1e9, -7e4, -65504.0, -1e4, 7e4, 1e9)  # what hides a key, or hides the others
SEEN = {"causal": np.tri(5, dtype=bool), "one blind": np.tri(5, k=-1, dtype=bool), "none": np.zeros((5, 5), bool)}


def by_hand(q, k, v, mask):
    return ht.softmax(ht.matmul(q, ht.matrix_transpose(k)) / 8**0.5 + mask) @ v


@pytest.mark.sampled(12)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("attend", [ht.scaled_dot_product_attention, by_hand])
def test_float_masks_hide_in_16_bits_what_they_hide_in_32(precision, seen, attend):
    """Also numbers that float16 has not, and where they hide all, of which 16 bits would leave no difference."""
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    values = np.random.default_rng(1).normal(size=(2, 2, 5, 8)).astype("f")
    x, fed, hidden = ht.placeholder("x", values.shape), ht.placeholder("m", (5, 5)), ht.placeholder("h", (5, 5))
    for far in FAR:
        mask = np.where(SEEN[seen], 0, far).astype("f")
        kept = ht.variable("v", mask, trainable=attend is not by_hand)
        masks = [fed, ht.constant(mask), kept, *([hidden * far] if np.isfinite(far) else [])]
        ys = [attend(x * 1.5, x, x, m) for m in masks]
        outputs = [*ys, *(ht.gradients(ht.sum(ht.square(y)), [x])[0] for y in ys)]
        feed = {x: values, fed: mask, hidden: (~SEEN[seen]).astype("f")}
        plain, low = (
            ht.Executor(outputs, **given).run({n: feed[n] for n in feed if n is not hidden or len(masks) > 3})
            for given in ({"passes": []}, {"precision": precision})
        )
        for got, wanted in zip(low, plain, strict=True):
            np.testing.assert_allclose(got, wanted, atol=5e-2 if precision == "float16" else 0.3, err_msg=str(far))


def test_mistakes(monkeypatch):
    _, loss, _ = linear()
    with pytest.raises(ArgumentError, match=r"(?s)unknown precision 'half'.*use one of float32, float16, bfloat16"):
        ht.Executor([loss], precision="half")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    types.bfloat16.cache_clear()
    with pytest.raises(MissingDependencyError, match="bfloat16 needs ml_dtypes"):
        ht.Executor([loss], precision="bfloat16")


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda x: ht.full((3,), 0.5, "bfloat16"), [0.5] * 3),
        (lambda x: ht.arange(3, dtype="bfloat16"), [0, 1, 2]),
        (lambda x: ht.astype(x, "bfloat16"), [0, 1, 1.5]),
        (lambda x: ht.one_hot(ht.astype(x, "int64"), 2, "bfloat16"), [[1, 0], [0, 1], [0, 1]]),
        (lambda x: ht.einsum("i->", ht.astype(x, "bfloat16")), 2.5),
    ],
    ids=["full", "arange", "astype", "one_hot", "einsum"],
)
def test_numbers_are_made_inbfloat16(make, values):
    pytest.importorskip("ml_dtypes")
    x = ht.placeholder("x", (3,))
    node = make(x)
    y = ht.evaluate(node, {x: np.array([0, 1, 1.5], "float32")} if x in topological([node]) else {})
    assert y.dtype.name == "bfloat16"
    np.testing.assert_array_equal(y.astype("float32"), values)
