"""What answers cost beside ONNX Runtime: `python examples/benchmarks/serving.py` (extras `serve` and `dev`).

Three models at batches of 1 and 32: called in one process ("call"), over HTTP by one client ("http"), and by eight at
once ("load"), whose requests share runs. Both engines stand behind the same server and get the same bytes, safetensors;
rounds alternate between them, and ratios, hetu by ONNX Runtime, are of neighbors. Milliseconds are of a request.
Ignored on purpose: what bodies of JSON cost, networks, and GPUs.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import peer_hetu
from report import Row, add_arguments, report
from rows import WORKLOADS
from safetensors.numpy import save
from workloads import Workload

import hetu as ht
from hetu.serving import serve

MODELS = {
    "LeNet": WORKLOADS["lenet_infer"],
    "BERT-mini": WORKLOADS["bert_infer"].sized(d=256, length=128, vocabulary=30522),
    "Wide&Deep": WORKLOADS["wide_deep_infer"],
}
BATCHES = 1, 32
CLIENTS = 8
SECONDS = 0.3  # that a round of one engine takes at least
ENGINES = "hetu", "ONNX Runtime"


# -- the same model in ONNX -------------------------------------------------------------------------------------------


class Value:
    """A value of a graph of ONNX, as `networks.py` computes with it."""

    def __init__(self, words: OnnxWords, name: str) -> None:
        self.words, self.name = words, name

    def __add__(self, other: Value) -> Value:
        return self.words.node("Add", self, other)


class OnnxWords:
    """The words of `networks.py` that the models here use, as nodes of ONNX."""

    def __init__(self, workload: Workload) -> None:
        self.nodes: list[Any] = []
        self.weights, self.number = workload.weights(), itertools.count()
        self.arrays = dict(self.weights)

    def node(self, op: str, *inputs: Value, **attributes: Any) -> Value:
        name = f"{op}_{next(self.number)}"
        self.nodes.append(onnx.helper.make_node(op, [i.name for i in inputs], [name], name, **attributes))
        return Value(self, name)

    def array(self, array: Any) -> Value:
        self.arrays[name := f"array_{next(self.number)}"] = np.asarray(array)
        return Value(self, name)

    def weight(self, name: str, *shape: int) -> Value:
        return Value(self, name)

    def linear(self, x: Value, name: str, inputs: int, outputs: int) -> Value:
        return self.node("MatMul", x, self.weight(f"{name}.weight")) + self.weight(f"{name}.bias")

    def conv(self, x: Value, name: str, inputs: int, outputs: int, size: int, *, padding: int | None = None,
             **options: Any) -> Value:  # fmt: skip
        pads = [size // 2 if padding is None else padding] * 4
        return self.node("Conv", x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"), pads=pads)

    def max_pool(self, x: Value, size: int) -> Value:
        return self.node("MaxPool", x, kernel_shape=[size] * 2, strides=[size] * 2)

    def embedding(self, ids: Value, name: str, rows: int, size: int) -> Value:
        return self.node("Gather", self.weight(name), ids)

    def layer_norm(self, x: Value, name: str, size: int) -> Value:
        scale, bias = (self.weight(f"{name}.{part}") for part in ("weight", "bias"))
        return self.node("LayerNormalization", x, scale, bias, epsilon=1e-5)

    def attention(self, qkv: Value, heads: int, causal: bool, mask: None) -> Value:
        apart = self.node("Reshape", qkv, self.array([0, 0, 3, heads, 64]))
        q, k, v = (self.node("Gather", apart, self.array(part), axis=2) for part in range(3))
        q, v = (self.node("Transpose", x, perm=[0, 2, 1, 3]) for x in (q, v))
        scores = self.node("MatMul", q, self.node("Transpose", k, perm=[0, 2, 3, 1]))
        shares = self.node("Softmax", self.node("Mul", scores, self.array(np.float32(0.125))))
        y = self.node("Transpose", self.node("MatMul", shares, v), perm=[0, 2, 1, 3])
        return self.node("Reshape", y, self.array([0, 0, 64 * heads]))

    def first(self, x: Value) -> Value:
        return self.node("Gather", x, self.array(0), axis=1)

    def concat(self, *values: Value) -> Value:
        return self.node("Concat", *values, axis=-1)

    def images(self, x: Value) -> Value:
        return x

    def __getattr__(self, name: str) -> Callable[..., Value]:
        op = {"relu": "Relu", "gelu": "Gelu", "flat": "Flatten"}[name]
        return lambda x: self.node(op, x)

    def written(self, path: Path, y: Value, inputs: dict[str, ht.Node]) -> None:
        kinds = {name: onnx.helper.np_dtype_to_tensor_dtype(node.dtype) for name, node in inputs.items()}
        fed = [
            onnx.helper.make_tensor_value_info(name, kinds[name], ["n", *node.shape[1:]])
            for name, node in inputs.items()
        ]
        out = onnx.helper.make_tensor_value_info(y.name, onnx.TensorProto.FLOAT, None)
        kept = [onnx.numpy_helper.from_array(array, name) for name, array in self.arrays.items()]
        graph = onnx.helper.make_graph(self.nodes, "model", fed, [out], kept)
        onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9), path)


class OnnxPredictor(ht.Predictor):
    """What serves a model by ONNX Runtime, which takes any number of rows as they are."""

    def __init__(self, path: Any, **options: Any) -> None:
        super().__init__(path, **options)
        self.session = onnxruntime.InferenceSession(Path(path).with_suffix(".onnx"), providers=["CPUExecutionProvider"])

    def predict(self, arrays: Any) -> dict[str, np.ndarray]:
        return {"y": self.session.run(None, dict(arrays))[0]}


PREDICTORS = {"hetu": ht.Predictor, "ONNX Runtime": OnnxPredictor}


@cache
def written(name: str) -> Path:
    """A model as a file of hetu's, and beside it as one of ONNX."""
    workload, path = MODELS[name], Path(tempfile.mkdtemp()) / "model.hetu"
    y, inputs = peer_hetu.built(workload)
    ht.save_model(path, {"y": y}, ht.Executor([y]).state)
    words = OnnxWords(workload)
    made = workload.kind.model(words, workload.s, **{n: Value(words, n) for n in inputs})
    words.written(path.with_suffix(".onnx"), made, inputs)
    return path


def feed(name: str, batch: int) -> dict[str, np.ndarray]:
    return MODELS[name].sized(batch).batches()[0]


# -- what is measured -------------------------------------------------------------------------------------------------


def compared(rounds: int, sides: Sequence[Callable[[], list[float]]], total: bool = False) -> Row:
    """Latencies of both sides in turn, in milliseconds; `total` for requests per second instead."""
    taken: list[list[list[float]]] = [[], []]
    for turn in range(2 * rounds):
        side = (turn + turn // 2) % 2  # each comes first as often
        taken[side].append(sides[side]())
    row: Row = {}
    for engine, found in zip(ENGINES, taken):
        flat = sorted(itertools.chain.from_iterable(found))
        if total:
            row[f"{engine}, requests/s"] = statistics.median(1 / statistics.fmean(part) for part in found)
        else:
            row[f"{engine}, ms"] = 1e3 * flat[len(flat) // 2]
            row[f"{engine}, p99"] = 1e3 * flat[min(len(flat) - 1, len(flat) * 99 // 100)]
    middle = statistics.fmean if total else statistics.median
    ratios = sorted(middle(a) / middle(b) for a, b in zip(*taken))
    row["ratio of times"] = [ratios[len(ratios) // 4], statistics.median(ratios), ratios[-1 - len(ratios) // 4]]
    return row


def timed(act: Callable[[], Any]) -> Callable[[], list[float]]:
    """A round: how long each of some calls takes."""

    def turn() -> list[float]:
        getattr(act, "begin", act)()
        found, end = [], time.perf_counter() + SECONDS
        while time.perf_counter() < end or len(found) < 3:
            began = time.perf_counter()
            act()
            found.append(time.perf_counter() - began)
        return found

    return turn


def calls(arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for name, batch in itertools.product(MODELS, BATCHES):
        fed, (ours, theirs) = feed(name, batch), (kind(written(name)) for kind in PREDICTORS.values())
        np.testing.assert_allclose(ours.predict(fed)["y"], theirs.predict(fed)["y"], rtol=1e-3, atol=1e-4)
        sides = [timed(partial(p.predict, fed)) for p in (ours, theirs)]
        rows.append({"model": name, "batch": batch, **compared(arguments.rounds, sides)})
    return rows


@contextmanager
def server(name: str, engine: str, *words: str) -> Iterator[int]:
    """A process that serves a model by an engine; its port."""
    command = [sys.executable, __file__, "--serve", engine, str(written(name)), "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said = ""
        while "stop it" not in said:
            said += (line := process.stdout.readline())
            assert line, said
        yield int(re.findall(r":(\d+)\n", said)[0])
    finally:
        process.terminate()
        process.wait(30)


class Client:
    """One connection, which stays for a round; a server closes those that rest."""

    def __init__(self, port: int, body: bytes) -> None:
        self.connection, self.body = http.client.HTTPConnection("127.0.0.1", port, timeout=60), body

    def begin(self) -> None:
        self.connection.close()
        self()

    def __call__(self) -> None:
        self.connection.request("POST", "/predict", self.body, {"content-type": "application/octet-stream"})
        answer = self.connection.getresponse()
        read = answer.read()
        assert answer.status == 200, read


def over_http(arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for name, batch in itertools.product(MODELS, BATCHES):
        with ExitStack() as stack:
            clients = [Client(stack.enter_context(server(name, e)), save(feed(name, batch))) for e in ENGINES]
            for client in clients:
                client()
            rows.append({"model": name, "batch": batch, **compared(arguments.rounds, [*map(timed, clients)])})
    return rows


def loaded(arguments: argparse.Namespace) -> list[Row]:
    """Also of waiting for others, which costs whoever comes alone."""
    rows = []
    for name, wait in itertools.product(MODELS, arguments.waits):
        with ExitStack() as stack:
            ports = [stack.enter_context(server(name, e, "--wait", str(wait))) for e in ENGINES]
            pool = stack.enter_context(ThreadPoolExecutor(CLIENTS))
            sides = [under_load(pool, port, save(feed(name, 1))) for port in ports]
            for side in sides:
                side()
            row = compared(arguments.rounds, sides, total=True)
            rows.append(
                {"model": name, "wait, ms": wait, **row, "rows in a run": " and ".join(map(rows_in_a_run, ports))}
            )
    return rows


def under_load(pool: ThreadPoolExecutor, port: int, body: bytes) -> Callable[[], list[float]]:
    """A round of all clients: seconds by requests, for each request."""
    clients = [Client(port, body) for _ in range(CLIENTS)]

    def turn() -> list[float]:
        began = time.perf_counter()
        count = sum(map(len, pool.map(lambda client: timed(client)(), clients)))
        return [(time.perf_counter() - began) / count] * count

    return turn


def rows_in_a_run(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/health")
    counts = json.loads(connection.getresponse().read())
    return f"{counts['rows'] / counts['runs']:.2f}"


PARTS = {
    "call": ("called in one process", calls),
    "http": ("over HTTP, one client", over_http),
    "load": (f"over HTTP, {CLIENTS} clients, batch 1", loaded),
}


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve.Predictor = PREDICTORS[sys.argv[2]]
        parser = argparse.ArgumentParser()
        serve.add_arguments(parser)
        sys.exit(serve.main(parser.parse_args(sys.argv[3:])))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser, PARTS, 7)
    parser.add_argument("--waits", type=float, nargs="+", default=[0.0], metavar="MS", help="of servers under load")
    report(parser.parse_args(), PARTS)


if __name__ == "__main__":
    main()
