"""Beside lab 8: stages of a small network are made here, and answer with arrays."""

from operators import linear, relu


def simulate(student, schedule, forward, backward):
    """[time, idle], or the name of the error."""
    try:
        time, idle = student.simulate(schedule, forward, backward)
    except ValueError:
        return "ValueError"
    return [float(time), float(idle)]


def stage_of(student, w, samples, last):
    """One linear layer, with relu where it is not the last."""

    def network(x, w):
        y = linear(x, w["w"], w["b"])
        return y if last else relu(y)

    shapes = {name: array.shape for name, array in w.items()}
    return student.Stage(network, shapes, (samples, w["w"].shape[0]), last)


def stage(student, w, x, g, last):
    """[loss, dL/dx, gradients] of a stage."""
    loss, dx, found = stage_of(student, w, len(x), last).backward(w, x, g)
    return loss, dx, found


def run(student, comm, w, steps, x, t):
    """One step of this rank's stage: [loss, gradients]."""
    made = stage_of(student, w, len(x[0]), comm.rank == comm.world_size - 1)
    loss, found = student.run(comm, made, w, steps, x, t)
    return loss, found
