"""The checks of lab 10: plans by trying all, costs by formulas written a second time."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from typing import Any

import numpy as np

from hetu.teach.labs import Lab, Student, different

lab = Lab("10", "a planner", "planner.py")
Plan = dict[str, int]
Layer = dict[str, Any]
MACHINE = {"ranks": 4, "memory": 1e9, "speed": 1e9, "latency": 1e-3, "bandwidth": 1e6}
LAYERS: list[Layer] = [
    {"flops": 4e6, "weights": 1000.0, "output": 500.0, "divisible": False},
    {"flops": 2e6, "weights": 8000.0, "output": 200.0, "divisible": True},
    {"flops": 2e6, "weights": 4000.0, "output": 100.0, "divisible": True},
]


def plan(data: int, tensor: int, stages: int, micro_batches: int) -> Plan:
    return {"data": data, "tensor": tensor, "stages": stages, "micro_batches": micro_batches}


@lab.check("the time of an all-reduce", hint="Lab 5: 2 (n - 1) steps, and in each a message of one n-th of the bytes.")
def reduction(student: Student) -> str:
    seen = different(student.all_reduce_time(4000.0, 4, MACHINE), 0.012, "4000 bytes on 4 ranks: ")
    seen = seen or different(student.all_reduce_time(4000.0, 1, MACHINE), 0, "on one rank: ")
    ### BEGIN HIDDEN TESTS
    n, nbytes = int(student.rng.integers(2, 9)), float(student.rng.integers(1, 10**6))
    wanted = (2 * n - 2) * (MACHINE["latency"] + nbytes / n / MACHINE["bandwidth"])
    seen = seen or different(student.all_reduce_time(nbytes, n, MACHINE), wanted, f"{nbytes:g} bytes on {n} ranks: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "layers divided so that the most expensive run is as cheap as possible",
    hint="best[k][j] compares the worst of both sides, max(best[k - 1][i], costs of i to j), over every i; a sum"
    " of costs is a difference of two running sums.",
    points=3,
)
def divided(student: Student) -> str:
    seen = different(student.divide([4.0, 2.0, 2.0, 3.0], 2), [0, 2, 4]) or different(student.divide([5.0], 1), [0, 1])
    seen = seen or different(student.divide([1.0, 1.0, 1.0, 9.0], 3)[2:], [3, 4], "an expensive last one: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(6):
        costs = [float(n) for n in student.rng.integers(1, 20, int(student.rng.integers(4, 9)))]
        stages = int(student.rng.integers(2, 5))
        got = student.divide(costs, stages)
        seen = (
            seen or valid(got, len(costs), stages) or different(worst(costs, got), least(costs, stages), f"{costs}: ")
        )
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "of equally good places the smallest, and no empty run",
    hint="Replace only what is worse (<, not <=). Fewer layers than stages is a ValueError.",
)
def equally(student: Student) -> str:
    seen = different(student.divide([1.0, 1.0, 1.0], 2), [0, 1, 3], "[1, 1, 1] in 2: ")
    seen = seen or different(student.divide([1.0, 1.0], 3), "ValueError", "2 layers, 3 stages: ")
    ### BEGIN HIDDEN TESTS
    n = int(student.rng.integers(1, 9))
    costs = [float(2 * n), float(n), float(n), float(n)]
    seen = seen or different(student.divide(costs, 2), [0, 1, 4], f"{costs} in 2: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "all plans of a number of ranks",
    hint="Every way to write `ranks` as a product of three; data must divide the batch. Micro-batches 1, 2, 4 "
    "... as long as they divide a rank's part of it, and only 1 for one stage.",
    points=2,
)
def plans(student: Student) -> str:
    seen = different(
        sorted(student.plans(2, 4)), [[1, 1, 2, 1], [1, 1, 2, 2], [1, 1, 2, 4], [1, 2, 1, 1], [2, 1, 1, 1]]
    )
    seen = seen or different(sorted(student.plans(2, 3)), [[1, 1, 2, 1], [1, 2, 1, 1]], "2 ranks, a batch of 3: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(3):
        ranks, batch = int(student.rng.choice([4, 6, 8, 12])), int(student.rng.choice([8, 12, 24, 32]))
        wanted = sorted([p["data"], p["tensor"], p["stages"], p["micro_batches"]] for p in every(ranks, batch))
        seen = seen or different(sorted(student.plans(ranks, batch)), wanted, f"{ranks} ranks, a batch of {batch}: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "the memory of the fullest rank",
    hint="Three times the weights; results of one micro-batch of all layers of the stage; the output of the "
    "layer before it, once for each micro-batch that 1F1B keeps in stage s: min(stages - s, micro-batches).",
    points=2,
)
def memory(student: Student) -> str:
    seen = ""
    for p, wanted in ((plan(4, 1, 1, 1), 39800), (plan(1, 4, 1, 1), 15200), (plan(1, 1, 2, 4), 36800)):
        seen = seen or different(student.memory(p, LAYERS, 4), wanted, f"{p}: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(4):
        layers, p = drawn(student.rng)
        seen = seen or different(student.memory(p, layers, 16), bytes_of(p, layers, 16), f"{p}: ")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "the time of a step",
    hint="(micro-batches + stages - 1) times the slowest stage, for one micro-batch: forward and backward are "
    "three times the floating-point operations; an all-reduce for each divided layer; two messages at a "
    "stage's end. Then the all-reduce of the weights, over the data-parallel ranks.",
    points=3,
)
def step(student: Student) -> str:
    seen = ""
    for p, wanted in ((plan(4, 1, 1, 1), 0.0495), (plan(1, 4, 1, 1), 0.0738), (plan(1, 1, 2, 2), 0.084)):
        seen = seen or different(student.step_time(p, LAYERS, 4, MACHINE), wanted, f"{p}: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(6):
        layers, p = drawn(student.rng)
        seen = seen or different(student.step_time(p, layers, 16, MACHINE), seconds(p, layers, 16), f"{p}: ")
    ### END HIDDEN TESTS
    return seen


@lab.check("the fastest plan", hint="Of those with no more stages than layers, the one of the least step_time.")
def fastest(student: Student) -> str:
    seen = different(student.choose(LAYERS, 4, MACHINE), [4, 1, 1, 1])
    seen = seen or different(
        student.choose(LAYERS[:1], 3, MACHINE | {"ranks": 2}), [1, 2, 1, 1], "one layer, 2 ranks: "
    )
    ### BEGIN HIDDEN TESTS
    for _ in range(3):
        layers, _ = drawn(student.rng)
        machine = MACHINE | {"bandwidth": float(student.rng.choice([1e4, 1e6, 1e8]))}
        times = [
            (seconds(p, layers, 16, machine), k, p) for k, p in enumerate(every(4, 16)) if p["stages"] <= len(layers)
        ]
        best = min(times)[0]
        near = [
            [p["data"], p["tensor"], p["stages"], p["micro_batches"]] for t, _, p in times if t <= best * (1 + 1e-9)
        ]
        got = student.choose(layers, 16, machine)
        seen = seen or ("" if list(got) in near else f"got {got}, wanted {near[0]}")
    ### END HIDDEN TESTS
    return seen


@lab.check(
    "only plans that fit in memory",
    hint="Leave out what needs more than the machine's memory before you look for the fastest; ValueError if "
    "nothing fits.",
)
def fits(student: Student) -> str:
    seen = different(student.choose(LAYERS, 4, MACHINE | {"memory": 10.0}), "ValueError", "10 bytes: ")
    seen = seen or different(student.choose(LAYERS, 4, MACHINE | {"memory": 15200.0}), [1, 4, 1, 1], "15200 bytes: ")
    ### BEGIN HIDDEN TESTS
    for _ in range(3):
        layers, _ = drawn(student.rng)
        possible = [p for p in every(4, 16) if p["stages"] <= len(layers)]
        sizes = sorted(bytes_of(p, layers, 16) for p in possible)
        limit = sizes[len(sizes) // 3]
        times = [(seconds(p, layers, 16), p) for p in possible if bytes_of(p, layers, 16) <= limit]
        best = min(t for t, _ in times)
        near = [[p["data"], p["tensor"], p["stages"], p["micro_batches"]] for t, p in times if t <= best * (1 + 1e-9)]
        got = student.choose(layers, 16, MACHINE | {"memory": limit})
        seen = seen or ("" if list(got) in near else f"{limit:g} bytes: got {got}, wanted {near[0]}")
    ### END HIDDEN TESTS
    return seen


### BEGIN HIDDEN TESTS
def valid(bounds: Any, layers: int, stages: int) -> str:
    whole = len(bounds) == stages + 1 and bounds[0] == 0 and bounds[-1] == layers
    rising = all(a < b for a, b in pairwise(bounds))
    return "" if whole and rising else f"got bounds {bounds} for {layers} layers in {stages} runs"


def worst(costs: list[float], bounds: Any) -> float:
    return max(sum(costs[a:b]) for a, b in pairwise(bounds))


def least(costs: list[float], stages: int) -> float:
    """Over all divisions."""
    inner = combinations(range(1, len(costs)), stages - 1)
    return min(worst(costs, [0, *cut, len(costs)]) for cut in inner)


def every(ranks: int, batch: int) -> list[Plan]:
    found = []
    for data, tensor, stages in product(range(1, ranks + 1), repeat=3):
        if data * tensor * stages == ranks and batch % data == 0:
            part = batch // data
            micro = [m for m in (1, 2, 4, 8, 16, 32, 64) if part % m == 0 and (m == 1 or stages > 1)]
            found += [plan(data, tensor, stages, m) for m in micro]
    return found


def drawn(rng: np.random.Generator) -> tuple[list[Layer], Plan]:
    """Layers with whole costs that differ, so that there is one best division, and one of the plans of four ranks."""
    flops = rng.permutation([1.0, 2.1, 4.3, 8.7, 17.9])[: int(rng.integers(4, 6))]
    layers = []
    for n in flops:
        sizes = [float(k) for k in rng.integers(100, 9000, 2)]
        layers.append({"flops": n * 1e6, "weights": sizes[0], "output": sizes[1], "divisible": bool(rng.integers(2))})
    possible = every(4, 16)
    return layers, possible[int(rng.integers(len(possible)))]


def runs(p: Plan, layers: list[Layer]) -> list[list[Layer]]:
    """The division that the recurrence finds: the smallest last place that is as good as any, then the one before."""
    costs, end, found = [layer["flops"] for layer in layers], len(layers), []
    for k in range(p["stages"], 1, -1):
        options = []
        for i in range(k - 1, end):
            options.append((max(least(costs[:i], k - 1), sum(costs[i:end])), i))
        found.append(layers[min(options)[1] : end])
        end = min(options)[1]
    return [layers[:end], *found[::-1]]


def kept_weights(layer: Layer, p: Plan) -> float:
    return float(layer["weights"]) / (p["tensor"] if layer["divisible"] else 1)


def bytes_of(p: Plan, layers: list[Layer], batch: int) -> float:
    micro, parts = batch / p["data"] / p["micro_batches"], runs(p, layers)
    found = []
    for s, part in enumerate(parts):
        inputs = parts[s - 1][-1]["output"] * min(p["stages"] - s, p["micro_batches"]) if s else 0.0
        found.append(3 * sum(kept_weights(x, p) for x in part) + micro * (sum(x["output"] for x in part) + inputs))
    return max(found)


def seconds(p: Plan, layers: list[Layer], batch: int, machine: dict[str, float] = MACHINE) -> float:
    micro, parts = batch / p["data"] / p["micro_batches"], runs(p, layers)

    def message(nbytes: float) -> float:
        return machine["latency"] + nbytes / machine["bandwidth"]

    def reduced(nbytes: float, n: int) -> float:
        return 2 * (n - 1) * message(nbytes / n)

    stages = []
    for s, part in enumerate(parts):
        work = sum(3 * micro * x["flops"] / (p["tensor"] if x["divisible"] else 1) for x in part) / machine["speed"]
        sent = sum(reduced(micro * x["output"], p["tensor"]) for x in part if x["divisible"])
        stages.append(work + sent + (2 * message(micro * part[-1]["output"]) if s < len(parts) - 1 else 0))
    last = max(reduced(sum(kept_weights(x, p) for x in part), p["data"]) for part in parts)
    return (p["micro_batches"] + p["stages"] - 1) * max(stages) + last


### END HIDDEN TESTS
