"""How long it takes from a model to its first step, by nodes: `python examples/benchmarks/start.py [--nodes 1000 ...]`.

Milliseconds of processor time for each node of the differentiated graph, as deep stacks grow: "build" is the model, its
gradient and Adam; "program" is all rewriting, the plan of the memory, and binding, with compiled code at hand; "new
shape" is the same again for another batch and length. The second part compiles in processes with an empty cache.
Ignored on purpose: importing, data, and what a step takes (`train_step.py`).
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from report import Row, add_arguments, report

import hetu as ht
from hetu.cpu_kernels import compiled
from hetu.optim import Adam

FOLDER = Path(__file__).parent
WIDTH, WORDS = 32, 50
Block = Callable[[ht.Node], ht.Node]


def mlp(h: ht.Node) -> ht.Node:
    return h + ht.nn.Linear(WIDTH, WIDTH, activation=ht.gelu)(ht.nn.LayerNorm(WIDTH)(h))


def transformer(h: ht.Node) -> ht.Node:
    h = h + ht.nn.MultiHeadAttention(WIDTH, 4, causal=True)(ht.nn.LayerNorm(WIDTH)(h))
    up = ht.nn.Linear(WIDTH, 2 * WIDTH, activation=ht.gelu)(ht.nn.LayerNorm(WIDTH)(h))
    return h + ht.nn.Linear(2 * WIDTH, WIDTH)(up)


def training(block: Block, layers: int) -> ht.Executor:
    """Reads the words of a text one after the other, through a stack of blocks."""
    with ht.scope("model"):
        ids, words = (ht.placeholder(name, (None, None), "int64") for name in ("ids", "words"))
        h = ht.nn.Embedding(WORDS, WIDTH)(ids)
        for _ in range(layers):
            h = block(h)
        loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(WIDTH, WORDS)(h), words))
        return ht.Executor([loss, Adam(1e-3).minimize(loss)])


def feed(batch: int, length: int) -> dict[str, np.ndarray]:
    return dict.fromkeys(("ids", "words"), np.zeros((batch, length), np.int64))


def nodes_of(executor: ht.Executor) -> int:
    (subgraph,) = executor.subgraphs.values()
    return len(subgraph.written.nodes)


def depth(block: Block, nodes: int) -> int:
    """The number of layers that gives about so many nodes."""
    one, two = (nodes_of(training(block, layers)) for layers in (1, 2))
    return max(1, round((nodes - one) / (two - one)) + 1)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """The processor time of some work, and its result."""
    gc.collect()
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def stack(block: Block, nodes: int, rounds: int) -> Row:
    """The least of some rounds."""
    layers, shapes = depth(block, nodes), [(2, 8), (3, 10)]
    training(block, layers).program(feed(*shapes[0]))  # compiles what is not at hand
    best: dict[str, float] = {}
    for _ in range(rounds):
        taken: dict[str, float] = {}
        taken["build"], executor = seconds(partial(training, block, layers))
        for name, shape in zip(("program", "new shape"), shapes):
            taken[name], program = seconds(partial(executor.program, feed(*shape)))
        best = {name: min(s, best.get(name, s)) for name, s in taken.items()}
    count = nodes_of(executor)
    row: Row = {"blocks": block.__name__, "layers": layers, "nodes": count, "instructions": len(program.steps)}
    row |= {f"{name} ms": round(1e3 * s / count, 3) for name, s in best.items()}
    return row | {"build + program ms": round(1e3 * (best["build"] + best["program"]) / count, 3)}


def stacks(arguments: argparse.Namespace) -> list[Row]:
    return [stack(block, nodes, arguments.rounds) for block in BLOCKS.values() for nodes in arguments.nodes]


def cold(arguments: argparse.Namespace) -> list[Row]:
    return [in_a_process(name, layers) for name in BLOCKS for layers in (1, 4)]


def in_a_process(name: str, layers: int) -> Row:
    """What a process compiles that finds nothing: texts, the units that they are put into, and seconds of the clock."""
    command = [sys.executable, "-c", f"import start; start.tell(start.{name}, {layers})"]
    with tempfile.TemporaryDirectory() as cache:
        variables = os.environ | {"XDG_CACHE_HOME": cache}
        text = subprocess.run(command, cwd=FOLDER, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout
    texts, units, spent = text.split()
    return {"blocks": name, "layers": layers, "texts": int(texts), "units": int(units), "seconds": float(spent)}


def tell(block: Block, layers: int) -> None:
    training(block, layers).program(feed(2, 8))
    sources = compiled.built()
    files = {os.stat(s.paths(compiled.folder())[0]).st_ino for s in sources}
    print(len(sources), len(files), compiled.spent())


BLOCKS: dict[str, Block] = {"mlp": mlp, "transformer": transformer}
PARTS = {
    "stacks": ("milliseconds of processor time per node", stacks),
    "cold": ("what is compiled where nothing is kept", cold),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="How long it takes from a model to its first step.")
    add_arguments(parser, PARTS, rounds=3)
    nodes = [1000, 5000, 10_000, 20_000]
    shown = " ".join(map(str, nodes))
    parser.add_argument("--nodes", type=int, nargs="+", default=nodes, help=f"of the graphs (default: {shown})")
    report(parser.parse_args(), PARTS)


if __name__ == "__main__":
    main()
