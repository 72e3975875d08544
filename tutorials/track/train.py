"""Given, not a lab: LeNet on four ranks with all that you wrote, in one of five ways.

    python transport.py 4 train.py data digits.npz result.json        data parallel
    python transport.py 4 train.py tensor digits.npz result.json      two by two: data and tensor parallel
    python transport.py 4 train.py pipeline digits.npz result.json    two by two: data parallel and two stages
    python transport.py 5 train.py server digits.npz result.json      four workers and a server, staleness 1
    python transport.py 1 train.py one digits.npz result.json         a single process, to compare with

`digits.npz` has x_train, y_train, x_test, y_test. Rank 0 writes result.json.
"""

import json
import sys
import time

import numpy as np
from data_parallel import DataParallel, average, shard
from pipeline import Stage, one_f_one_b, run
from ring import all_reduce, broadcast
from server import Cache, Server, Worker, from_rows, serve, to_rows
from tensor_parallel import DIVIDED, divide, tensor_parallel_lenet, whole
from training import LENET, Model, Momentum, classifier, features, fit, initial, lenet
from transport import Group, connect

BATCH, RATE, SEED = 128, 0.05, 0
WIDTH, STALENESS = 64, 1  # of the server's rows
MICRO_BATCHES = 4


def grid(comm, columns):
    """The ranks as a table of `columns` columns: (this rank's column, its row) as groups."""
    row, column = divmod(comm.rank, columns)
    return (
        Group(comm, range(column, comm.world_size, columns)),
        Group(comm, range(row * columns, (row + 1) * columns)),
    )


def one(comm, x, labels):
    model, weights, update = Model(lenet, LENET, (BATCH, 28, 28, 1)), initial(LENET, SEED), Momentum(RATE).update

    def step(numbers):
        loss, found = model.gradients(weights, x[numbers], labels[numbers])
        update(weights, found)
        return loss

    return step, lambda: weights


def data(comm, x, labels):
    model = DataParallel(Model(lenet, LENET, (BATCH // comm.world_size, 28, 28, 1)), comm)
    weights, update = initial(LENET, SEED + comm.rank), Momentum(RATE).update
    model.start(weights)

    def step(numbers):
        loss, found = model.gradients(weights, x[numbers], labels[numbers])
        update(weights, found)
        return loss

    return step, lambda: weights


def tensor(comm, x, labels):
    column, row = grid(comm, 2)
    model = DataParallel(tensor_parallel_lenet(row, BATCH // column.world_size), column)
    weights, update = divide(initial(LENET, SEED), DIVIDED, row.rank, row.world_size), Momentum(RATE).update

    def step(numbers):
        loss, found = model.gradients(weights, x[numbers], labels[numbers])
        update(weights, found)
        return loss

    def everything():
        return {name: whole(row, a, DIVIDED[name]) if name in DIVIDED else a for name, a in weights.items()}

    return step, everything


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


def main(way, images, result, epochs=3):
    comm, stored = connect(), np.load(images)
    made = WAYS[way](comm, stored["x_train"], stored["y_train"])
    if made is not None:
        step, everything = made
        count = len(stored["x_train"]) // BATCH * int(epochs)
        before, began, processor = comm.bytes_sent, time.perf_counter(), time.process_time()
        losses = fit(step, len(stored["x_train"]), BATCH, SEED, int(epochs))
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
        sent, weights = comm.bytes_sent - before, everything()
        if comm.rank == 0:
            model = Model(lenet, LENET, (BATCH, 28, 28, 1))
            figures = {
                "losses": losses,
                "accuracy": model.accuracy(weights, stored["x_test"], stored["y_test"]),
                "bytes_a_step": sent / count,
                "ms_a_step": 1e3 * seconds / count,
                "processor_ms_a_step": 1e3 * processor / count,
            }
            with open(result, "w", encoding="utf-8") as file:
                json.dump(figures, file)
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
