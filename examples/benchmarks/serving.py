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
import peer_hetu
from report import Row, add_arguments, report
from rows import WORKLOADS
from safetensors.numpy import save

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


# -- the same model for both ------------------------------------------------------------------------------------------


class OnnxPredictor(ht.Predictor):
    """What serves a model by ONNX Runtime, which takes any number of rows as they are."""

    def __init__(self, path: Any, **options: Any) -> None:
        import onnxruntime  # of the extra [dev]

        super().__init__(path, **options)
        self.session = onnxruntime.InferenceSession(Path(path).with_suffix(".onnx"), providers=["CPUExecutionProvider"])

    def predict(self, arrays: Any) -> dict[str, np.ndarray]:
        return {"y": self.session.run(None, dict(arrays))[0]}


PREDICTORS = {"hetu": ht.Predictor, "ONNX Runtime": OnnxPredictor}


@cache
def written(name: str) -> Path:
    """A model as a file of hetu's, and beside it as one of ONNX."""
    path, (y, _) = Path(tempfile.mkdtemp()) / "model.hetu", peer_hetu.built(MODELS[name])
    executor = ht.Executor([y])
    ht.save_model(path, {"y": y}, executor.state)
    ht.onnx.save(path.with_suffix(".onnx"), {"y": y}, executor.state)
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
    rows = []
    for name in MODELS:
        with ExitStack() as stack:
            ports = [stack.enter_context(server(name, e, "--wait", str(arguments.wait))) for e in ENGINES]
            pool = stack.enter_context(ThreadPoolExecutor(CLIENTS))
            sides = [under_load(pool, port, save(feed(name, 1))) for port in ports]
            for side in sides:
                side()
            row = compared(arguments.rounds, sides, total=True)
            rows.append({"model": name, **row, "rows in a run": " and ".join(map(rows_in_a_run, ports))})
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
    waits = "that servers under load wait for others (default: %(default)s)"
    parser.add_argument("--wait", type=float, default=0.0, metavar="MS", help=waits)
    report(parser.parse_args(), PARTS)


if __name__ == "__main__":
    main()
