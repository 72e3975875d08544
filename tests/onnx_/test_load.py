"""Models of ONNX that are built, trained and refused; `test_nodes.py` has the operators one by one."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetu as ht

onnx = pytest.importorskip("onnx")
helper, TensorProto = onnx.helper, onnx.TensorProto


def parsed(body: str, opsets: str = '"": 18') -> Any:
    return onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{opsets}]> {body}")


MLP = """
mlp (float[batch, 4] x) => (float[batch, 2] y)
<float[4, 3] w1 = {1, -1, 0, 1, 2, 1, 0, 1, 1, 2, 1, 1}, float[3] b1 = {0, 0, 1}, float[3, 2] w2 = {1, 2, 1, 0, 0, 1}>
{ h = Gemm(x, w1, b1)
  r = Relu(h)
  y = MatMul(r, w2) }
"""


def test_a_loaded_model_is_trained_saved_and_fed_any_batch(tmp_path: Path) -> None:
    onnx.save(parsed(MLP), tmp_path / "mlp.onnx")
    loaded = ht.onnx.load(tmp_path / "mlp.onnx")
    assert ([*loaded.inputs], [*loaded.outputs], [*loaded.variables]) == (["x"], ["y"], ["w1", "b1", "w2"])
    x, y = loaded.inputs["x"], loaded.outputs["y"]
    loss = ht.mean(ht.square(y - 1.0))
    ex = ht.Executor({"eval": [y], "train": [loss, ht.optim.SGD(0.01).minimize(loss)]})
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(5, 4)).astype("f")
    wanted = (
        pytest.importorskip("onnx.reference").ReferenceEvaluator(str(tmp_path / "mlp.onnx")).run(None, {"x": batch})[0]
    )
    np.testing.assert_allclose(ex.run("eval", {x: batch})[0], wanted, rtol=1e-5, atol=1e-6)
    losses = [float(ex.run("train", {x: batch})[0]) for _ in range(20)]
    assert losses[-1] < losses[0]
    ex.save(tmp_path / "trained")
    ex.load(tmp_path / "trained")


def test_shapes_follow_open_sizes() -> None:
    """As exporters write it: the batch is asked for, and put into a shape with others."""
    model = parsed("""heads (float[n, t, 8] x) => (float[n, 2, t, 4] y) {
        s = Shape(x)
        zero = Constant<value = int64[1] {0}>()
        one = Constant<value = int64[1] {1}>()
        n = Gather(s, zero)
        t = Gather(s, one)
        last = Constant<value = int64[1] {2}>()
        f = Gather(s, last)
        two = Constant<value = int64[1] {2}>()
        half = Div(f, two)
        many = Mul(n, two)
        again = Div(many, two)
        shape = Concat<axis = 0>(again, t, two, half)
        parts = Reshape(x, shape)
        y = Transpose<perm = [0, 2, 1, 3]>(parts)
    }""")
    loaded = ht.onnx.load(model)
    ex = ht.Executor([loaded.outputs["y"]])
    for n, t in ((2, 3), (5, 1)):
        x = np.arange(n * t * 8, dtype="f").reshape(n, t, 8)
        np.testing.assert_array_equal(ex.run({"x": x})[0], x.reshape(n, t, 2, 4).transpose(0, 2, 1, 3))


def test_open_sizes_are_not_compared() -> None:
    """Two may be one size, or not: neither branch is right."""
    model = parsed("""f (float[n, 2] x, float[m, 2] z) => (float[k, 2] y) {
        a = Shape<start = 0, end = 1>(x)
        b = Shape<start = 0, end = 1>(z)
        c = Equal(a, b)
        y = If (c) <then_branch = yes () => (p) { p = Neg(x) }, else_branch = no () => (q) { q = Neg(z) }>
    }""")
    refused(lambda: model, "its input 'condition' follows from sizes that are open")
    y = ht.onnx.load(model, fixed={"n": 3, "m": 3}).outputs["y"]
    assert y.shape == (3, 2)


def test_images_of_any_size_are_read() -> None:
    model = parsed("""f (float[n, 1, h, w] x) => (float[n, 2, 1, 1] y)
        <float[2, 1, 3, 3] k = {1, 0, 2, 0, 3, 0, 1, 1, 1, 0, 1, 0, 2, 2, 2, 0, 1, 5}> {
        a = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, k)
        b = MaxPool<kernel_shape = [2, 2]>(a)
        y = GlobalAveragePool(b)
    }""")
    ex = ht.Executor([*ht.onnx.load(model).outputs.values()])
    reference = pytest.importorskip("onnx.reference").ReferenceEvaluator(model)
    for shape in ((1, 1, 8, 8), (2, 1, 12, 9)):
        x = np.random.default_rng(0).normal(size=shape).astype("f")
        np.testing.assert_allclose(ex.run({"x": x})[0], reference.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5)


def test_inputs_that_decide_shapes_are_told_at_once_and_fixed() -> None:
    model = parsed("""f (float[4] x, int64[2] shape, int64[1] axes, float[1] scale) => (float[n, m, k] y) {
        two = Constant<value = int64 {2}>()
        part = Mul(shape, two)
        a = Reshape(x, part)
        b = Unsqueeze(a, axes)
        y = Mul(b, scale)
    }""")
    with pytest.raises(
        ht.errors.ArgumentError,
        match=r"inputs 'shape', 'axes' decide shapes[^$]*fix: .*fixed={'shape': array, 'axes': array}",
    ):
        ht.onnx.load(model)
    loaded = ht.onnx.load(model, fixed={"shape": [1, 1], "axes": [0]})
    assert loaded.outputs["y"].shape == (1, 2, 2)
    assert [*loaded.inputs] == ["x", "scale"]


def test_an_open_size_is_fixed_by_its_name() -> None:
    assert ht.onnx.load(parsed(MLP), fixed={"batch": 7}).outputs["y"].shape == (7, 2)
    with pytest.raises(ht.errors.UnknownNameError, match=r"no open size 'bach'[^$]*did you mean 'batch'"):
        ht.onnx.load(parsed(MLP), fixed={"bach": 7})
    with pytest.raises(ht.errors.DTypeError, match="the fixed value of 'x' wants float32"):
        ht.onnx.load(parsed(MLP), fixed={"x": "seven"})


def test_statistics_and_bounds_are_not_trained() -> None:
    model = parsed("""f (float[n, 2, 3, 3] x) => (float[n, 2, 3, 3] y)
        <float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] m = {0, 1}, float[2] v = {1, 4}, float top = {6}>
        { z = BatchNormalization(x, s, b, m, v)  y = Clip(z, , top) }""")
    trained = {name: node.attrs["trainable"] for name, node in ht.onnx.load(model).variables.items()}
    assert trained == {"s": True, "b": True, "m": False, "v": False, "top": False}


def test_statistics_are_not_trained_however_they_come() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "own": 1]>
        f (float[n, 2, 3] x) => (float[n, 2, 3] y)
        <float[2] s = {1, 2}, float[2] m = {0, 1}, float[2] v = {1, 4}> { w = Identity(v)  y = own.norm(x, s, m, w) }
        <opset_import: ["": 18], domain: "own"> norm (x, s, m, v) => (y) { y = BatchNormalization(x, s, m, m, v) }""")
    loaded = ht.onnx.load(model)
    assert {k: v.attrs["trainable"] for k, v in loaded.variables.items()} == {"s": True, "m": False, "v": False}
    x = np.ones((1, 2, 3), "f")
    assert ht.evaluate(loaded.outputs["y"], {"x": x})[0, :, 0] == pytest.approx([1, 1], rel=1e-4)


def test_numbers_without_axes_are_trained_if_they_are_named() -> None:
    """Exporters write what is fixed in a formula, an epsilon or a scale, as initial values without axes."""
    loaded = ht.onnx.load(
        parsed(
            "f (float[2] x) => (float[2] y) <float two = {2}, float[2] w = {1, 1}> {a = Mul(x, two)  y = Mul(a, w) }"
        )
    )
    loss, sgd = ht.sum(loaded.outputs["y"]), ht.optim.SGD(0.5)
    for named, losses in (None, [4.0, 0.0]), ([loaded.variables["two"]], [4.0, 2.0]):
        ex = ht.Executor([loss, sgd.minimize(loss, named)])
        assert [float(ex.run({"x": [1.0, 1.0]})[0]) for _ in range(2)] == losses


def test_inputs_that_have_initial_values_are_fixed_too() -> None:
    model = parsed("f (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }")
    for fixed, wanted in (None, [1, 2]), ({"w": [5, 6]}, [5, 6]):
        y = ht.onnx.load(model, fixed=fixed).outputs["y"]
        assert ht.evaluate(y, {"x": [1.0, 1.0]}).tolist() == wanted


def test_a_node_stands_in_the_place_of_an_input() -> None:
    x = ht.placeholder("own", (None, 4))
    first = ht.onnx.load(parsed(MLP), fixed={"x": x * 2.0})
    with ht.scope("again"):
        again = ht.onnx.load(parsed(MLP), fixed={"x": x})
    assert (first.inputs, again.variables["w1"].name) == ({}, "again/w1")
    y, z = ht.Executor([first.outputs["y"], again.outputs["y"]]).run({x: [[1.0] * 4]})
    assert (y[0] > z[0]).all()
    for wrong in (ht.placeholder("whole", (None, 4), "int64"), ht.placeholder("flat", (4,))):
        with pytest.raises(ht.errors.DTypeError, match=r"fixed value of 'x' is [if]\d+.*, wanted float32 of 2 axes"):
            ht.onnx.load(parsed(MLP), fixed={"x": wrong})


def test_images_of_any_size_grow_and_are_averaged() -> None:
    model = parsed("""f (float[n, 2, h, w] x) => (float[a, b, c, d] y)
        <float[4] twice = {1, 1, 2, 2}, float[2, 1, 2, 2] k = {1, 0, 2, 0, 3, 0, 1, 1}> {
        a = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">(x, , twice)
        b = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(a)
        y = ConvTranspose<strides = [2, 2]>(b, k)
    }""")
    ex = ht.Executor([ht.onnx.load(model).outputs["y"]])
    reference = pytest.importorskip("onnx.reference").ReferenceEvaluator(model)
    for shape in ((1, 2, 2, 3), (2, 2, 3, 1)):
        x = np.random.default_rng(0).normal(size=shape).astype("f")
        np.testing.assert_allclose(ex.run({"x": x})[0], reference.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "call", ["GatherND(x, i)", "ScatterND(x, i, u)", "ScatterElements<axis = 1>(x, i, v)", "Gather<axis = 1>(x, i)"]
)
@pytest.mark.parametrize("place", [3, -4])
def test_places_lie_within_their_own_axis(call: str, place: int) -> None:
    """Also where they would be those of another row."""
    model = parsed(f"""f (float[2, 3] x, int64[1, 2] i) => (float[a] y) <float[1] u = {{1}}, float[1, 2] v = {{1, 1}}>
        {{ y = {call} }}""")
    loaded = ht.onnx.load(model)
    with pytest.raises(ht.errors.ValueRangeError, match="lies outside 0 to 2"):
        ht.evaluate(loaded.outputs["y"], {"x": np.ones((2, 3), "f"), "i": [[1, place]]})


def test_functions_of_the_model_are_read() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "own": 1]>
        f (float[2] x) => (float[2] y) { y = own.twice <by = 2.0> (x) }
        <opset_import: ["": 18], domain: "own"> twice <by> (a) => (b) {
            c = Constant <value_float: float = @by> ()
            b = Mul(a, c)
        }""")
    loaded = ht.onnx.load(model)
    assert ht.evaluate(loaded.outputs["y"], {"x": [1.0, 2.0]}).tolist() == [2.0, 4.0]


def test_functions_are_told_apart_by_their_overload() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18, "own": 1]>
        f (float[2] x) => (float[2] y) { a = own.g(x)  y = own.g(a) }
        <opset_import: ["": 18], domain: "own", overload: "one"> g (a) => (b) { b = Neg(a) }
        <opset_import: ["": 18], domain: "own", overload: "two"> g (a) => (b) { b = Add(a, a) }""")
    for node, overload in zip(model.graph.node, ("one", "two")):
        node.overload = overload
    assert ht.evaluate(ht.onnx.load(model).outputs["y"], {"x": [1.0, 2.0]}).tolist() == [-2.0, -4.0]


def test_control_flow_is_followed_where_it_is_known() -> None:
    text = """f (float[n] x, {cond}) => (float[m] y) {{
        y = If (c) <then_branch = yes () => (a) {{ a = Mul(x, x) }}, else_branch = no () => (b) {{ b = Neg(x) }}>
    }}"""
    given = parsed(text.format(cond="bool c"))
    refused(lambda: given, "inputs 'c' decide shapes")
    for choice, wanted in ((True, [1, 4]), (False, [-1, -2])):
        y = ht.onnx.load(given, fixed={"c": choice}).outputs["y"]
        assert ht.evaluate(y, {"x": [1.0, 2.0]}).tolist() == wanted


def repeated(times: int) -> Any:
    return parsed(f"""f (float[2] x) => (float[2] y, float[k, 2] all)
        <int64 n = {{{times}}}, bool always = {{1}}>
        {{ y, all = Loop (n, always, x) <body = f (int64 i, bool c, float[2] s) => (bool d, float[2] t, float[2] u) {{
            d = Identity(c)
            t = Add(s, s)
            u = Identity(s) }}>
        }}""")


def test_loops_of_a_known_number_of_steps_become_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ht.onnx.load(repeated(3))
    ex = ht.Executor([*loaded.outputs.values()])
    y, every = ex.run({"x": [1.0, 2.0]})
    assert (y.tolist(), every.tolist()) == ([8, 16], [[1, 2], [2, 4], [4, 8]])
    gradient = ht.gradients(ht.sum(loaded.outputs["y"]), [loaded.inputs["x"]])[0]
    assert ht.evaluate(gradient, {"x": [1.0, 2.0]}).tolist() == [8, 8]
    monkeypatch.setattr(importlib.import_module("hetu.onnx.meaning"), "MOST", 100)
    refused(lambda: repeated(10**9), "at most 100 are built")
    refused(lambda: repeated(0), "it has no steps")
    endless = repeated(3)
    endless.graph.node[0].input[0] = ""
    refused(lambda: endless, "at most 100 are built")


QUANTIZED = """f (float[4] x) => (float[4] y) <int4[4] w = {-8, -1, 0, 7}, float s = {0.5}, int4 z = {1}> {
    n = DequantizeLinear (w, s, z)
    y = Add(x, n)
}"""


def test_numbers_of_four_bits_are_kept_in_eight() -> None:
    model = parsed(QUANTIZED, '"": 21')
    tensor = model.graph.initializer[0]
    tensor.ClearField("int32_data")
    tensor.raw_data = bytes([0xF8, 0x70])  # two in a byte, the lower half first
    y = ht.onnx.load(model).outputs["y"]
    assert ht.evaluate(y, {"x": [0.0] * 4}).tolist() == [-4.5, -1, -0.5, 3]
    tensor.raw_data = b"123"
    refused(lambda: model, "has 3 bytes, of sizes (4,) there are 2")


def test_nothing_is_rounded_to_numbers_of_four_bits() -> None:
    text = "f (float[4] x) => (int4[4] y) <float s = {0.5}, int4[1] z = {1}, int64[1] one = {1}> { %s }"
    for body in ("y = QuantizeLinear (x, s, z)", "q = Reshape (z, one)  y = QuantizeLinear (x, s, q)"):
        refused(lambda body=body: parsed(text % body, '"": 21'), "its result is of INT4")
    refused(lambda: parsed(text % "y = CastLike (x, z)", '"": 21'), "its result is of INT4")


# -- what is refused ------------------------------------------------------------------------------------------------


def refused(make: Callable[[], Any], *said: str) -> None:
    with pytest.raises(ht.errors.HetuError) as caught:
        ht.onnx.load(make())
    assert caught.value.fix
    for words in said:
        assert words in caught.value.message


def external(location: str, **keys: Any) -> Any:
    model = parsed("f (float[3] x) => (float[3] y) <float[3] w = {1, 2, 3}> { y = Add(x, w) }")
    tensor = model.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **keys}.items():
        tensor.external_data.add(key=key, value=str(value))
    return model


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("f (float[2] x) => (float[2] y) { a = Foo(x)  y = Bar(a) }", "2 operators of the model are not read: Foo"),
        ("f (float[2] x) => (float[2] y) { a = Foo(x)  y = Bar(a) }", "Bar 'that makes y' (unknown in opset 18)"),
        ("f (float[2] x, int64 i) => (float[2] y) { s = SequenceConstruct(x)  y = SequenceAt(s, i) }", "(sequences)"),
        ("f (float[2] x) => (float[2] y) { y = Cast<to = 17>(x) }", "FLOAT8E4M3FN"),
        ("f (float[2] x) => (float[2] y) { y = Relu(z) }", "nothing makes 'z'"),
        ("f (float[2] x) => (float[2] y) { y = Relu<slope = 1>(x) }", "'slope' is not read"),
        ("f (float[2] x) => (float[2] y) { y = Relu(x, x) }", "has 2 inputs"),
        ("f (float x, float[2, 3] z) => (float[2] y) { y = Concat(x, z) }", "cannot be built"),
        ("f (float[2] x) => (float[2] y) { y = Neg(x)  y = Exp(x) }", "Exp 'that makes y' makes 'y' again"),
        ("f (float[n, 2] x) => (float[n] y) { y = Squeeze(x) }", "the size ?x.0 is not known"),
        ("f (float[2, 4, c] x) => (float[2, 4, 2] y) { y = DFT<inverse = 1>(x) }", "the size ?x.2 is not known"),
        ("f (float[6] x) => (float[a] y, float[b] z) { y, z = Split<num_outputs = 3>(x) }", "where 3 are wanted"),
        ("f (float[5] x) => (float[a] y) { y, a, b, c = Split<num_outputs = 4>(x) }", "parts of [2, 2, 2, -1]"),
        ("f (float[1, 99999, 1] x) => (float[a] y) { y = DFT<onesided = 0>(x) }", "99999 x 99999 numbers, too many"),
        ("f (float[4] x) => (float[a] y) <int64[1] k = {5}> { y, i = TopK(x, k) }", "takes 5 of 4"),
        ("f (float[1, 1, 4] x) => (float[a] y) <int64[3] s = {1, 1, 1000000000}> { y = Resize(x, , , s) }", "too many"),
        ('f (float[4] x) => (float[a] y) <int64[2] p = {0, 99999999999}> { y = Pad<mode = "wrap">(x, p) }', "too many"),
        ("f (float[1, 1, 99999, 9999] x) => (float[a] y) { y, z = MaxPool<kernel_shape = [2, 2]>(x) }", "too many"),
        ("f (float[1, 2, 2] x) => (float[a] y) { y = LRN<size = 999999>(x) }", "at most 4096"),
        (
            "f (float[99999, 1, 1] x, float[1, 1, 1] w) => (float[a] y) { y = RNN<hidden_size = 1>(x, w, w) }",
            "99999 steps",
        ),
        ("f (string[2] x) => (string[2] y) { y = Identity(x) }", "'x' is of STRING"),
        ("f (seq(float[2]) x) => (seq(float[2]) y) { y = Identity(x) }", "wanted a tensor"),
    ],
)
def test_what_cannot_be_read_is_named(body: str, said: str) -> None:
    refused(lambda: parsed(body), said)


SLIDES = [f"{name}={[2] * n}" for name in ("kernel_shape", "strides", "dilations") for n in (1, 3)]
SLIDES += ["pads=[1, 1, 1]", "pads=[1, 1]"]


@pytest.mark.parametrize(
    ("name", "slide"),
    [
        *itertools.product(["MaxPool", "AveragePool", "LpPool"], SLIDES),
        *itertools.product(["Conv", "ConvTranspose"], SLIDES[2:]),  # the weights say how large their kernels are
    ],
)
def test_windows_have_as_many_axes_as_images(name: str, slide: str) -> None:
    kernel = "kernel_shape=[2, 2], " * (not slide.startswith("kernel") and "Pool" in name)
    weights = "" if "Pool" in name else ", w"
    body = f"{{ y = {name}<{kernel}{slide}>(x{weights}) }}"
    given = "f (float[1, 1, 6, 6] x) => (float[a, b, c, d] y) <float[1, 1, 2, 2] w = {1, 1, 1, 1}> "
    refused(lambda: parsed(given + body))


@pytest.mark.parametrize("call", ["Slice(x, two, one)", "Slice(x, one, one, two)", "Pad(x, one)", "Pad(x, three)"])
def test_lists_that_belong_together_are_as_long(call: str) -> None:
    given = (
        "f (float[6, 6] x) => (float[a, b] y) <int64[1] one = {0}, int64[2] two = {0, 1}, int64[3] three = {1, 1, 1}>"
    )
    refused(lambda: parsed(f"{given} {{ y = {call} }}"))


def test_sparse_tensors_are_refused() -> None:
    model = parsed("f (float[2] x) => (float[2] y) { y = Add(x, w) }")
    model.graph.sparse_initializer.add(dims=[2])
    refused(lambda: model, "sparse tensors")


def test_other_opsets_are_refused() -> None:
    softmax = "f (float[2] x) => (float[2] y) { y = Softmax(x) }"
    refused(lambda: parsed(softmax, '"": 11'), "of opset 11, which means something else than in 13")
    refused(lambda: parsed(softmax, '"": 999'), "the model is of opset 999")
    refused(lambda: parsed("f (float[2] x) => (float[2] y) { y = far.Thing(x) }"), "the model names no version")


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    refused(lambda: file, "there is no file")
    whole = parsed(MLP).SerializeToString()
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        with pytest.raises(ht.errors.HetuError):
            ht.onnx.load(file)
    file.write_bytes(b"\x00" * 100)
    refused(lambda: file, "is no whole model")
    with open(file, "wb") as sparse:
        sparse.truncate((1 << 31) + 5)
    refused(lambda: file, "a model at most")
    refused(lambda: 3, "got 3")


def test_numbers_lie_in_the_folder_and_are_all_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    np.array([1, 2, 3], "<f4").tofile(folder / "w.bin")
    np.array([1, 2, 3], "<f4").tofile(tmp_path / "outside.bin")

    def saved(location: str, **keys: Any) -> Path:
        (folder / "m.onnx").write_bytes(external(location, **keys).SerializeToString())
        return folder / "m.onnx"

    loaded = ht.onnx.load(saved("w.bin", offset=0, length=12))
    assert ht.evaluate(loaded.outputs["y"], {"x": [1.0, 1.0, 1.0]}).tolist() == [2, 3, 4]
    for location in ("../outside.bin", str(tmp_path / "outside.bin"), "", "."):
        refused(lambda location=location: saved(location), "outside of" if location != "." else "takes 12 bytes")
    refused(lambda: saved("none.bin"), "takes 12 bytes")
    refused(lambda: saved("w.bin", offset=4), "takes 12 bytes")
    refused(lambda: saved("w.bin", offset=-4), "lies at '-4'")
    refused(lambda: external("w.bin"), "lies in the file 'w.bin'")


def test_functions_neither_call_themselves_nor_unfold_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.import_module("hetu.onnx.load"), "MOST_NODES", 1000)

    def calling(*bodies: str) -> Any:
        functions = "".join(
            f'<opset_import: ["": 18, "own": 1], domain: "own"> f{i} (a) => (b) {{ {body} }}'
            for i, body in enumerate(bodies)
        )
        model = "m (float[2] x) => (float[2] y) { y = own.f0(x) }"
        return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18, "own": 1]> {model} {functions}')

    refused(lambda: calling("b = own.f1(a)", "b = own.f0(a)"), "the function calls itself")
    twice = [f"c = own.f{i + 1}(a) b = own.f{i + 1}(c)" for i in range(24)]
    refused(lambda: calling(*twice, "b = Neg(a)"), "unfolds to more than")


def test_sizes_are_compared_before_memory_is_taken() -> None:
    def model() -> Any:
        made = parsed("f (float[3] x) => (float[3] y) <float[3] w = {1, 2, 3}> { y = Add(x, w) }")
        tensor = made.graph.initializer[0]
        tensor.ClearField("float_data")
        tensor.raw_data = b"1234"
        tensor.dims[:] = [1 << 40, 1 << 40]
        return made

    refused(model, "has 4 bytes, of sizes")
