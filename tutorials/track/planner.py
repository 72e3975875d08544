"""Lab 10: a planner.

Four ways to train on n ranks, and their mixtures: which is the fastest that fits? A planner answers before anything
runs, from a *model of the cost*: a message of b bytes takes latency + b / bandwidth seconds, and f floating-point
operations take f / speed. Such a model is wrong by some ten percent and still ranks the plans well, as they differ by
much more (Jia et al., "Beyond Data and Model Parallelism", 2019; Miao et al., "Galvatron", VLDB 2023).

Plain data throughout. A *machine* is {"ranks", "memory" (bytes of a rank), "speed", "latency", "bandwidth"}. A *layer*
is {"flops" (of a forward pass, for one sample), "weights" (bytes), "output" (bytes of its result, for one sample),
"divisible" (whether tensor parallelism can divide it)}. A *plan* is {"data", "tensor", "stages", "micro_batches"}, and
the product of the first three is the number of ranks.
"""

from itertools import pairwise

BACKWARD = 2  # a backward pass takes twice the forward pass: it has two products where that has one


def message_time(nbytes, machine):
    return machine["latency"] + nbytes / machine["bandwidth"]


def all_reduce_time(nbytes, n, machine):
    """Seconds of lab 5's all-reduce of `nbytes` on n ranks: its number of steps, each a message of one chunk."""
    ### BEGIN SOLUTION
    return 2 * (n - 1) * message_time(nbytes / n, machine)
    ### END SOLUTION


def divide(costs, stages):
    """The bounds [0, ..., len(costs)] of `stages` runs of layers, none empty, so that the most expensive run is as
    cheap as possible. ValueError if there are fewer layers than stages.

    Dynamic programming: best[k][j], the least possible maximum for the first j layers in k runs, is the least
    max(best[k - 1][i], costs of i to j) over all i. Of several i that are equally good take the smallest.
    """
    ### BEGIN SOLUTION
    count, infinite = len(costs), float("inf")
    if count < stages:
        raise ValueError(f"{count} layers cannot be divided into {stages} stages")
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = [[infinite] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0
    for k in range(1, stages + 1):
        for j in range(k, count + 1):
            for i in range(k - 1, j):
                worst = max(best[k - 1][i], sums[j] - sums[i])
                if worst < best[k][j]:
                    best[k][j], cut[k][j] = worst, i
    bounds = [count]
    for k in range(stages, 0, -1):
        bounds.append(cut[k][bounds[-1]])
    return bounds[::-1]
    ### END SOLUTION


def plans(ranks, batch):
    """All plans, as a list: data * tensor * stages is `ranks`; data divides the batch; micro_batches is 1 for one
    stage, else a power of two from 1 on that divides a data-parallel rank's part of the batch."""
    ### BEGIN SOLUTION
    found = []
    for data in range(1, ranks + 1):
        for tensor in range(1, ranks // data + 1):
            if ranks % (data * tensor) or batch % data:
                continue
            stages, micro = ranks // (data * tensor), 1
            while (batch // data) % micro == 0 and (micro == 1 or stages > 1):
                found.append({"data": data, "tensor": tensor, "stages": stages, "micro_batches": micro})
                micro *= 2
    return found
    ### END SOLUTION


def weight_bytes(layer, plan):
    return layer["weights"] / (plan["tensor"] if layer["divisible"] else 1)


def runs(plan, layers):
    """The layers of each stage, divided by their floating-point operations."""
    bounds = divide([layer["flops"] for layer in layers], plan["stages"])
    return [layers[start:stop] for start, stop in pairwise(bounds)]


def memory(plan, layers, batch):
    """Bytes of the fullest rank.

    A stage has its weights three times (with gradients and velocities), the results of all its layers for one
    micro-batch, and its input for each micro-batch that 1F1B keeps, min(stages - s, micro-batches) in stage s. Its
    input is the output of the layer before; that of the first stage is data, and does not count. A micro-batch is that
    of one data-parallel rank. Tensor parallelism divides weights alone (`weight_bytes`): every rank has whole results.
    """
    ### BEGIN SOLUTION
    samples = batch / plan["data"] / plan["micro_batches"]
    most, before = 0, 0
    for s, run in enumerate(runs(plan, layers)):
        kept = min(plan["stages"] - s, plan["micro_batches"])
        weights = sum(weight_bytes(layer, plan) for layer in run)
        results = sum(layer["output"] for layer in run)
        most = max(most, 3 * weights + samples * (results + kept * before))
        before = run[-1]["output"]
    return most
    ### END SOLUTION


def step_time(plan, layers, batch, machine):
    """Seconds of a step of training:

    (micro-batches + stages - 1) times the slowest stage's time for one micro-batch, plus the slowest stage's all-reduce
    of its weights' gradients over the data-parallel ranks. A stage's time for a micro-batch is that of its
    floating-point operations, forward and backward (see BACKWARD), where tensor parallelism divides those of divisible
    layers; plus, if tensor > 1, for each divisible layer an all-reduce of its output over the tensor-parallel ranks;
    plus, for each stage but the last, the messages of its output forward and of the gradient backward.
    """
    ### BEGIN SOLUTION
    samples, tensor = batch / plan["data"] / plan["micro_batches"], plan["tensor"]
    slowest = reduction = 0.0
    for s, run in enumerate(runs(plan, layers)):
        time = 0.0
        for layer in run:
            divided = tensor if layer["divisible"] else 1
            time += (1 + BACKWARD) * samples * layer["flops"] / divided / machine["speed"]
            if divided > 1:
                time += all_reduce_time(samples * layer["output"], tensor, machine)
        if s < plan["stages"] - 1:
            time += 2 * message_time(samples * run[-1]["output"], machine)
        slowest = max(slowest, time)
        weights = sum(weight_bytes(layer, plan) for layer in run)
        reduction = max(reduction, all_reduce_time(weights, plan["data"], machine))
    return (plan["micro_batches"] + plan["stages"] - 1) * slowest + reduction
    ### END SOLUTION


def choose(layers, batch, machine):
    """The fastest plan that fits in memory; of equally fast ones the first in `plans`. ValueError if none fits.

    Plans with more stages than layers are left out.
    """
    ### BEGIN SOLUTION
    possible = [p for p in plans(machine["ranks"], batch) if p["stages"] <= len(layers)]
    fitting = [p for p in possible if memory(p, layers, batch) <= machine["memory"]]
    if not fitting:
        raise ValueError("no plan fits in memory")
    return min(fitting, key=lambda p: step_time(p, layers, batch, machine))
    ### END SOLUTION
