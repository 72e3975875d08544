"""Lab 10: a planner. After tutorial 11.

A plan (data, tensor, stages) says how many ways a model is cut: `data` copies of it see different samples, each layer's
matrices lie on `tensor` ranks, and the layers on `stages` ranks one behind the other. The product of the three is the
number of ranks. Which plan is fastest, of those that fit into memory? Foretell it from a few numbers of the model and
of the machine.

Check yourself with `hetu lab check 10`.
"""

from typing import NamedTuple


class Model(NamedTuple):
    operations: float  # of one training step, all samples together
    parameters: int
    activations: float  # bytes that a step keeps for the backward pass, all samples together
    layers: int
    exchanged: float  # bytes of activations that one layer's tensor ranks add up in a step, all samples together


class Machine(NamedTuple):
    speed: float  # operations per second of a rank
    bandwidth: float  # bytes per second that a rank sends
    memory: float  # bytes of a rank


def plans(ranks):
    """All plans for so many ranks, as a list of (data, tensor, stages), smallest first."""
    ### BEGIN SOLUTION
    return [
        (data, tensor, ranks // data // tensor)
        for data in range(1, ranks + 1)
        if ranks % data == 0
        for tensor in range(1, ranks // data + 1)
        if ranks // data % tensor == 0
    ]
    ### END SOLUTION


def memory(model, plan):
    """The bytes that a rank needs.

    A parameter takes 16 bytes: 4 each for its value, its gradient and the two means of Adam. Parameters are divided by
    tensor ranks and by stages, and copied for data. Activations are divided by all three.
    """
    ### BEGIN SOLUTION
    data, tensor, stages = plan
    return 16 * model.parameters / (tensor * stages) + model.activations / (data * tensor * stages)
    ### END SOLUTION


def all_reduce(ranks, nbytes, bandwidth):
    """The seconds in which `ranks` ranks add up `nbytes` each, in a ring: as in lab 6."""
    ### BEGIN SOLUTION
    return 2 * (ranks - 1) / ranks * nbytes / bandwidth
    ### END SOLUTION


def seconds(model, machine, plan, parts):
    """The seconds of a step: what is computed, and after it what is sent.

    - The operations are divided evenly. A pipeline of s stages takes (parts + s - 1) / parts times as long.
    - Data ranks add up the gradients of the parameters that a rank holds, 4 bytes each.
    - Tensor ranks add up the activations of each layer that a rank holds: of the samples that its data rank sees.
    - Sending between stages costs nothing here.
    """
    ### BEGIN SOLUTION
    data, tensor, stages = plan
    computed = model.operations / (data * tensor * stages) / machine.speed * (parts + stages - 1) / parts
    gradients = all_reduce(data, 4 * model.parameters / (tensor * stages), machine.bandwidth)
    added = model.layers / stages * all_reduce(tensor, model.exchanged / data, machine.bandwidth)
    return computed + gradients + added
    ### END SOLUTION


def best(model, machine, ranks, parts):
    """The fastest plan that fits, the first of `plans` where several are; None if none fits.

    A model has to have a layer for each stage.
    """
    ### BEGIN SOLUTION
    fits = [p for p in plans(ranks) if memory(model, p) <= machine.memory and p[2] <= model.layers]
    return min(fits, key=lambda p: seconds(model, machine, p, parts), default=None)
    ### END SOLUTION
