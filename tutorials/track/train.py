"""Given, not a lab: LeNet on four ranks with all that you wrote.

    python transport.py 4 train.py data digits.npz result.json        data parallel
    python transport.py 4 train.py tensor digits.npz result.json      two by two: data and tensor parallel
    python transport.py 4 train.py pipeline digits.npz result.json    two by two: data parallel and two stages
    python transport.py 5 train.py server digits.npz result.json      four workers and a server, staleness 1
    python transport.py 1 train.py one digits.npz result.json         a single process, to compare with
    python transport.py 4 train.py plan digits.npz result.json        trains nothing: what your planner foretells

`digits.npz` has x_train, y_train, x_test, y_test. Rank 0 writes result.json. `hetu lab track figures` does all of this.
"""

import json
import sys
import time

import numpy as np
from data_parallel import DataParallel, average, shard
from pipeline import Stage, one_f_one_b, run
from planner import BACKWARD, choose, step_time
from ring import all_reduce, broadcast
from server import Cache, Server, Worker, from_rows, serve, to_rows
from tensor_parallel import DIVIDED, divide, tensor_parallel_lenet, whole
from training import LENET, Model, Momentum, classifier, features, fit, initial, lenet
from transport import Group, connect

BATCH, RATE, SEED = 128, 0.05, 0
WIDTH, STALENESS = 64, 1  # of the server's rows
MICRO_BATCHES = 4


def grid(comm, columns):
    """The ranks as a table of `columns` columns: the ranks of this one's column, and those of its row, as groups."""
    row, column = divmod(comm.rank, columns)
    ranks = np.arange(comm.world_size).reshape(-1, columns).tolist()
    return Group(comm, [each[column] for each in ranks]), Group(comm, ranks[row])


def stepping(model, weights, x, labels):
    """A step of training for `fit`: the gradients of these samples, and the update of `weights`."""
    update = Momentum(RATE).update

    def step(numbers):
        loss, found = model.gradients(weights, x[numbers], labels[numbers])
        update(weights, found)
        return loss

    return step


# Each way has a function that makes a step of training, and one that returns all weights when training has ended.


def one(comm, x, labels):
    model, weights = Model(lenet, LENET, (BATCH, 28, 28, 1)), initial(LENET, SEED)
    return stepping(model, weights, x, labels), lambda: weights


def data(comm, x, labels):
    model = DataParallel(Model(lenet, LENET, (BATCH // comm.world_size, 28, 28, 1)), comm)
    weights = initial(LENET, SEED + comm.rank)
    model.start(weights)
    return stepping(model, weights, x, labels), lambda: weights


def tensor(comm, x, labels):
    column, row = grid(comm, 2)
    model = DataParallel(tensor_parallel_lenet(row, BATCH // column.world_size), column)
    weights = divide(initial(LENET, SEED), DIVIDED, row.rank, row.world_size)

    def everything():
        return {name: whole(row, a, DIVIDED[name]) if name in DIVIDED else a for name, a in weights.items()}

    return stepping(model, weights, x, labels), everything


def pipeline(comm, x, labels):
    column, row = grid(comm, 2)
    part = BATCH // column.world_size // MICRO_BATCHES
    mine = [name for name in LENET if name.startswith("conv") == (row.rank == 0)]
    shapes, last = {name: LENET[name] for name in mine}, row.rank == 1
    stage = Stage(classifier, shapes, (part, 400), last) if last else Stage(features, shapes, (part, 28, 28, 1), last)
    whole_network = initial(LENET, SEED)
    weights, update = {name: whole_network[name] for name in mine}, Momentum(RATE).update
    steps = one_f_one_b(row.world_size, MICRO_BATCHES)[row.rank]

    def step(numbers):
        own = np.split(shard(numbers, column.rank, column.world_size), MICRO_BATCHES)
        one_hot = np.eye(10, dtype=np.float32)
        loss, found = run(row, stage, weights, steps, [x[m] for m in own], [one_hot[labels[m]] for m in own])
        found = average(column, found | {"loss": np.array([loss or 0.0], np.float32)}, 1 << 20)
        means = all_reduce(row, found.pop("loss"))  # the first stage knows no loss
        update(weights, found)
        return float(means[0])

    def everything():
        for name, array in whole_network.items():
            broadcast(row, array, 0 if name.startswith("conv") else 1)
        return whole_network

    return step, everything


def server(comm, x, labels):
    workers = comm.world_size - 1
    weights = initial(LENET, SEED)
    table = to_rows(weights, WIDTH)
    if comm.rank == workers:
        serve(comm, Server(table, workers, STALENESS))
        return None
    model, optimizer = Model(lenet, LENET, (BATCH // workers, 28, 28, 1)), Momentum(RATE / workers)
    worker, ids = Worker(comm, Cache(len(table), STALENESS)), np.arange(len(table))

    def step(numbers):
        mine = shard(numbers, comm.rank, workers)
        weights = from_rows(worker.read(ids), LENET)
        loss, found = model.gradients(weights, x[mine], labels[mine])
        before = to_rows(weights, WIDTH)
        optimizer.update(weights, found)
        worker.push(ids, to_rows(weights, WIDTH) - before)
        worker.tick()
        return loss

    def everything():
        weights = from_rows(worker.pull(ids), LENET)
        worker.end()
        return weights

    return step, everything


WAYS = {way.__name__: way for way in (one, data, tensor, pipeline, server)}
PLANS = {
    "data": {"data": 4, "tensor": 1, "stages": 1, "micro_batches": 1},
    "tensor": {"data": 2, "tensor": 2, "stages": 1, "micro_batches": 1},
    "pipeline": {"data": 2, "tensor": 1, "stages": 2, "micro_batches": MICRO_BATCHES},
}
LAYERS = [  # of LeNet, as lab 10 describes them
    {"flops": 2 * 784 * 25 * 6, "weights": 4 * 156, "output": 4 * 1176, "divisible": False},
    {"flops": 2 * 100 * 150 * 16, "weights": 4 * 2416, "output": 4 * 400, "divisible": False},
    {"flops": 2 * 400 * 120, "weights": 4 * 48120, "output": 4 * 120, "divisible": True},
    {"flops": 2 * 120 * 84, "weights": 4 * 10164, "output": 4 * 84, "divisible": True},
    {"flops": 2 * 84 * 10, "weights": 4 * 850, "output": 4 * 10, "divisible": False},
]


def median_time(action, times):
    found = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return float(np.median(found))


def measured(comm, x, labels):
    """The machine of lab 10, measured while all ranks work."""
    part = BATCH // comm.world_size
    model, weights = Model(lenet, LENET, (part, 28, 28, 1)), initial(LENET, SEED)
    seconds = median_time(lambda: model.gradients(weights, x[:part], labels[:part]), 9)
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    small, large = (np.zeros((2, count), np.float32) for count in (1, 1 << 18))
    latency = median_time(lambda: comm.exchange([(right, small[0])], [(left, small[1])]), 9)
    longer = median_time(lambda: comm.exchange([(right, large[0])], [(left, large[1])]), 9)
    flops = (1 + BACKWARD) * part * sum(layer["flops"] for layer in LAYERS)
    rates = {"speed": flops / seconds, "latency": latency, "bandwidth": (1 << 20) / max(longer - latency, 1e-9)}
    return {"ranks": comm.world_size, "memory": 1e9} | rates


def foretold(machine):
    """Milliseconds of a step for each of PLANS, and the plan that `choose` takes."""
    times = {way: 1e3 * step_time(plan, LAYERS, BATCH, machine) for way, plan in PLANS.items()}
    return {"ms": times, "machine": machine, "chosen": choose(LAYERS, BATCH, machine)}


def trained(comm, made, stored, epochs):
    """Train, and what rank 0 knows of it: None on the others."""
    sent = comm.bytes_sent
    if made is not None:
        step, everything = made
        began, processor, sent = time.perf_counter(), time.process_time(), comm.bytes_sent
        losses = fit(step, len(stored["x_train"]), BATCH, SEED, epochs)
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
        sent, weights = comm.bytes_sent - sent, everything()
    if comm.rank > 0:
        comm.send(0, np.array([sent], np.int64))
        return None
    model, steps = Model(lenet, LENET, (BATCH, 28, 28, 1)), len(stored["x_train"]) // BATCH * epochs
    return {
        "losses": losses,
        "accuracy": model.accuracy(weights, stored["x_test"], stored["y_test"]),
        "bytes_a_step": (sent + sum(int(comm.recv(rank)[0]) for rank in range(1, comm.world_size))) / steps,
        "ms_a_step": 1e3 * seconds / steps,
        "processor_ms_a_step": 1e3 * processor / steps,
    }


def main(way, images, result, epochs=3):
    comm, stored = connect(), dict(np.load(images))
    if way == "plan":
        figures = foretold(measured(comm, stored["x_train"], stored["y_train"]))
    else:
        figures = trained(comm, WAYS[way](comm, stored["x_train"], stored["y_train"]), stored, int(epochs))
    if comm.rank == 0:
        with open(result, "w", encoding="utf-8") as file:
            json.dump(figures, file)
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
