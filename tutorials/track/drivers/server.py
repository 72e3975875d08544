"""Beside lab 9: servers and caches are made here, and answer with arrays."""

import numpy as np


def server(student, table, workers, staleness, events):
    """What a new server says to each of `events`, looked at when all have been; at last its table and the first one."""
    made = student.Server(table, workers, staleness)
    answers = [getattr(made, name)(*args) for name, *args in events]
    return answers, made.table, table


def cache(student, table, capacity, staleness, events):
    """[rows, ids that were asked of the server] for each reading event of a new cache.

    ["read", ids, clock], ["add", ids, changes]; ["set", ids, rows] changes the server's table.
    """
    made, answers, asked = student.Cache(capacity, staleness), [], []

    def pull(wanted):
        asked[-1].append([int(i) for i in wanted])
        return table[np.array(wanted)]

    for kind, ids, value in events:
        if kind == "set":
            table[ids] = value
        elif kind == "add":
            made.add(np.array(ids), np.array(value))
        else:
            asked.append([])
            rows = made.read(np.array(ids), value, pull)
            answers.append([np.array(rows), asked[-1]])
            rows[...] = -99.0  # what is read belongs to the reader
    return answers, int(made.pulled)


def rows(student, weights, width, shapes):
    """The table of all weights, its dtype, and the weights made of it again."""
    table = student.to_rows(weights, width)
    again = student.from_rows(table, {name: tuple(shape) for name, shape in shapes.items()})
    return table.copy(), str(table.dtype), again


def finish_times(student, durations, staleness):
    return [[float(t) for t in times] for times in student.finish_times(durations, staleness)]


def served(student, comm, table, staleness, steps, ids, change):
    """The last rank serves; the others push `change` to `ids` in each of `steps` steps. What they see at last."""
    if comm.rank == comm.world_size - 1:
        made = student.Server(table, comm.world_size - 1, staleness)
        student.serve(comm, made)
        return made.table
    worker = student.Worker(comm, student.Cache(len(table), 0))
    for _ in range(steps):
        worker.push(np.array(ids), np.array(change))
        worker.tick()
    found = worker.pull(np.array(ids))
    worker.end()
    return found


def crossed(student, comm, table, ids, change):
    """As `served`, for one push of each of two workers: that of worker 1 comes between both messages of worker 0's."""
    if comm.rank == comm.world_size - 1:
        return served(student, comm, table, None, 0, ids, change)
    worker = student.Worker(comm, student.Cache(len(table), 0))
    if comm.rank == 0:
        worker.request(student.PUSH, ids)
        comm.send(1, np.zeros(1))
        comm.recv(1)
        comm.send(worker.server, np.array(change))
    else:
        comm.recv(0)
        worker.push(np.array(ids), np.array(change))
        comm.send(0, np.zeros(1))
    worker.end()
    return None


def ahead(student, comm, table, staleness):
    """Worker 0 takes one step too many. Worker 1 begins when the server has heard of that, and ends one step."""
    if comm.rank == comm.world_size - 1:
        return served(student, comm, table, staleness, 0, [0], [[0.0, 0.0]])
    worker = student.Worker(comm, student.Cache(len(table), 0))
    if comm.rank == 0:
        for _ in range(staleness):
            worker.tick()
        worker.request(student.TICK)
        comm.send(1, np.zeros(1))
        comm.recv(worker.server)
    else:
        comm.recv(0)
        worker.pull([0])  # the answer comes after whatever the server had to say to worker 0
        worker.tick()
    worker.end()
    return None
