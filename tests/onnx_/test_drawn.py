"""Operators whose attributes and sizes are drawn at random, against ONNX Runtime, which knows nothing of us.

A row is an opset and an operator, of which each `{a|b}` draws one. Inputs are `f32[2, 3]`, numbers to be drawn, which
are fed (`same[3]`, of the kind before; `at[3]`, places; `bit[3]`, 0 or 1; `far[2, 2]`, infinite beside the
diagonal), or `i64=1, 2`,
which are initial values, or nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hetu as ht

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

DRAWS = 12
INT = "{i8|i16|i32|i64}"
ROWS = f"""
14 Div({INT}[2, 3]; same[3])
13 Mod<fmod={{0|1}}>({INT}[2, 3]; same[3])
13 {{Asin|Acos|Atanh|Asinh|Acosh|Sinh|Cosh|Tan}}(f32[9])
13 {{Sinh|Cosh|Exp|Tanh|Asinh|Acosh}}(f32=1.000001, 1.3, 60, 89)
13 Asinh(f32=-1e-6, -0.3, -89, -1e18, 1e-6, 3e38)
16 {{LeakyRelu|Elu}}<alpha={{0.2|1.0|1.7}}>(f32{{[2, 3]|[]}})
13 Celu<alpha={{0.2|1.7}}>(f32{{[2, 3]|[]}})
20 {{ReduceMax|ReduceMin}}<keepdims={{0|1}}>({{f32|i8|i32|i64|u8}}[{{0|2}}, 3]; i64={{0|-2|0, 1}})
13 Reduce{{L1|L2|SumSquare|LogSumExp|Mean}}<axes=[{{0|0, 2|1, -1}}], keepdims={{0|1}}>(f32[2, 3, 4])
18 {{ReduceL1|ReduceL2|ReduceSum|ReduceMax}}<noop_with_empty_axes={{0|1}}>(f32[2, 3])
13 CumSum<exclusive={{0|1}}, reverse={{0|1}}>(f32=1e9, 1, inf, 3; i64={{0|-1}})
13 CumSum<exclusive={{0|1}}, reverse={{0|1}}>({{f32|i32}}[3, 4]; i64={{0|-1}})
18 Pad<mode="{{constant|edge|reflect|wrap}}">({{f32|b8|i32}}[3, 4]; i64={{1, 0, 2, 1|0, 1, 0, 2|-1, 1, 0, -1}})
18 Pad(b8[3, 4]; i64=1, 0, 2, 1; b8=1)
13 Slice({{f32|i8}}[5, 4]; i64={{-9|-3|0|2|9}}; i64={{-9|-1|0|3|-2147483648}}; i64={{0|-1}}; i64={{-1|-2|1|2}})
18 y, z, u = Split<axis={{0|-1}}, num_outputs=3>(f32[5, 7])
13 GatherND<batch_dims={{0|1}}>(f32[2, 3, 4]; at[2, 1, 1])
18 ScatterElements(b8[4]; i64={{0, -1|2, 2}}; b8[2])
18 ScatterElements<reduction="{{none|add|mul|max|min}}">(f32[4]; i64={{0, -1|2, 2}}; f32[2])
13 {{DepthToSpace|SpaceToDepth}}<blocksize=2>(f32[2, 8, 4, 6])
13 DepthToSpace<blocksize=2, mode="{{DCR|CRD}}">(f32[2, 8, 1, 3])
13 y, at = MaxPool<kernel_shape=[2, 2], pads=[1, 0, 0, 1], storage_order={{0|1}}>(bit[1, 2, 3, 3])
13 AveragePool<kernel_shape=[3], strides=[2], ceil_mode=1, count_include_pad={{0|1}}, pads=[1, 1]>(f32[1, 2, 6])
13 GlobalLpPool<p={{1|2|3}}>(f32[2, 3, 4, 5])
20 GridSample<mode="{{linear|cubic}}", padding_mode="{{zeros|border|reflection}}">(f32[1, 2, 4, 3]; f32[1, 3, 2, 2])
19 Resize<coordinate_transformation_mode="tf_half_pixel_for_nn">(f32[1, 1, 5, 4]; ; f32=1, 1, {{2|3}}, 2)
13 ConvTranspose<strides=[{{1|2|3}}, 2], dilations=[2, 1], pads=[0, 1, {{0|1}}, 0]>(f32[2, 4, 3, 4]; f32[4, 2, 2, 3])
13 ConvTranspose<strides=[2, 3], output_shape=[{{4|5|6}}, {{10|11|12}}]>(f32[1, 2, 3, 4]; f32[2, 2, 1, 2])
13 ConvTranspose<strides=[2], group=2, output_padding=[{{0|1}}], pads=[{{0, 1|1, 0}}]>(f32[2, 4, 3]; f32[4, 2, 3])
13 ConvTranspose<strides=[2, {{1|3}}, 1], pads=[0, 1, 0, 1, 0, 0]>(f32[1, 2, 3, 2, 3]; f32[2, 2, 3, 2, 1]; f32[2])
21 QLinearMatMul(u8{{[2, 3, 4]|[3, 4]}}; f32=0.02; u8=3; u8[4, 3]; f32={{0.1, 0.2, 0.3|0.2}}; u8=4; f32=0.7; u8=9)
17 DFT(f32[2, 3, {{4|5}}, {{1|2}}])
17 DFT<axis={{1|2}}, inverse={{0|1}}>(f32[2, 3, {{4|5}}, {{1|2}}])
17 DFT<axis={{1|2}}, onesided={{0|1}}>(f32[2, 3, {{4|5}}, 1])
13 Einsum<equation="{{ii->i|ii|ii->|ij->ji|...i->...}}">(far[3, 3])
13 Einsum<equation="{{iij->ij|iji->ij|iii->i|...ii->...i}}">(f32[3, 3, 3])
"""


def layers() -> Iterator[str]:
    """Recurrent layers with other activations in each direction, with and without peepholes."""
    kinds = ("RNN", 1, 1), ("GRU", 3, 2), ("LSTM", 4, 3)
    for (name, gates, many), way in itertools.product(kinds, ("forward", "reverse", "bidirectional")):
        d, names = 1 + (way == "bidirectional"), '"Relu", "Sigmoid", "Tanh", "Tanh", "Relu", "Sigmoid"'
        acts = ", ".join(names.split(", ")[: d * many])
        more = f"f32[{d}, {4 * gates}]; {{|i32=4, 1, 2}}; {{|f32[{d}, 3, 2]}}"
        peeps = f"; {{|f32[{d}, 3, 2]}}; {{|f32[{d}, 6]}}" if name == "LSTM" else ""
        linear = ", linear_before_reset={0|1}" if name == "GRU" else ""
        yield (
            f'14 {name}<hidden_size=2, direction="{way}"{{|, activations=[{acts}]}}{linear}>'
            f"(f32[4, 3, 5]; f32[{d}, {2 * gates}, 5]; f32[{d}, {2 * gates}, 2]; {more}{peeps})"
        )


def drawn(row: str, rng: np.random.Generator) -> str:
    """The row with one of each `{a|b}`."""
    return re.sub(r"\{([^{}]*)\}", lambda found: str(rng.choice(found[1].split("|"))), row)


def numbers(rng: np.random.Generator, dtype: np.dtype, shape: list[int]) -> np.ndarray:
    """Also the ends of integers, and no zeros, by which they would be divided, nor -1, where that overflows."""
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind == "f":
        return rng.normal(0, 1.5, shape).astype(dtype)
    ends = np.iinfo(dtype)
    return rng.choice(np.array([ends.min, ends.max, 2, 3, 5, 7, ends.max // 2], dtype), shape)


def given(token: str, rng: np.random.Generator, last: Any) -> np.ndarray:
    kind, sign, rest = re.fullmatch(r"(\w+)([\[=])(.*)", token).groups()  # type: ignore[union-attr]
    shape = [int(s) for s in rest.rstrip("]").split(",") if s.strip()] if sign == "[" else []
    if kind == "at":
        return rng.integers(-2, 2, shape)
    if kind == "bit":
        return rng.integers(0, 2, shape).astype("u1")
    if kind == "far":
        return np.where(np.eye(*shape) == 1, 1, np.inf).astype("f")
    dtype = last if kind == "same" else np.dtype({"b": "?"}.get(kind[0], f"{kind[0]}{int(kind[1:]) // 8}"))
    return numbers(rng, dtype, shape) if sign == "[" else np.array([float(v) for v in rest.split(",")]).astype(dtype)


def model_of(row: str, rng: np.random.Generator) -> tuple[Any, dict[str, np.ndarray]]:
    """A model of one operator, and what it is fed."""
    helper, pattern = onnx.helper, r"(\d+) (?:(.*) = )?(\w+.*)\((.*)\)"
    opset, outputs, call, inputs = re.fullmatch(pattern, drawn(row, rng)).groups()  # type: ignore[union-attr]
    node, fed, kept, last = onnx.parser.parse_node(f"{outputs or 'y'} = {call}()"), {}, [], None
    for place, token in enumerate(inputs.split(";")):
        node.input.append(f"i{place}" if token.strip() else "")
        if token.strip():
            array = given(token.strip(), rng, last)
            last = array.dtype
            if "=" in token:
                kept.append(onnx.numpy_helper.from_array(array, f"i{place}"))
            else:
                fed[f"i{place}"] = array
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in fed.items()
    ]
    made = [onnx.ValueInfoProto(name=name) for name in node.output]
    graph = helper.make_graph([node], "drawn", infos, made, kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", int(opset))], ir_version=8), fed


def wanted(model: Any, fed: dict[str, np.ndarray]) -> Any:
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(
        None, fed
    )


@pytest.mark.parametrize("row", [*ROWS.strip().splitlines(), *layers()], ids=lambda row: re.sub(r"[<(].*", "", row))
def test_operators_are_those_of_the_runtime(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETU_KERNELS", "0")
    for draw in range(DRAWS):
        model, fed = model_of(row, np.random.default_rng(draw))
        loaded = ht.onnx.load(model)
        feed = {node: fed[name] for name, node in loaded.inputs.items()}
        made = ht.Executor([*loaded.outputs.values()]).run(feed)
        for got, right in zip(made, wanted(model, fed), strict=True):
            said = onnx.printer.to_text(model)
            assert (got.shape, got.dtype) == (right.shape, right.dtype), said
            np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-4, err_msg=said)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
@pytest.mark.parametrize(("call", "wanted"), [("Div", "floor_divide"), ("Mod", "remainder"), ("Mod<fmod=1>", "fmod")])
def test_the_least_integer_divided_by_minus_one_wraps_as_numpys(call: str, wanted: str, dtype: str) -> None:
    """The runtime ends with a signal in 64 bits."""
    values = f"{dtype}[9] a, {dtype}[9] b"
    text = f'<ir_version: 9, opset_import: ["": 18]> g ({values}) => ({dtype}[9] y) {{ y = {call}(a, b) }}'
    loaded = ht.onnx.load(onnx.parser.parse_model(text))
    feed = {"a": np.full(9, np.iinfo(dtype).min, dtype), "b": np.full(9, -1, dtype)}
    with np.errstate(all="ignore"):
        right = getattr(np, wanted)(*feed.values()).tolist()
    assert ht.Executor([*loaded.outputs.values()]).run(feed)[0].tolist() == right
    assert ht.evaluate(loaded.outputs["y"], feed).tolist() == right
