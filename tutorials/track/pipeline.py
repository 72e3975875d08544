"""Lab 8: pipeline schedules.

A network may be divided between its layers: stage s has some layers in a row, receives what stage s - 1 computed, and
sends its result to stage s + 1. With one batch only one stage works at a time, so the batch is divided into
*micro-batches* that follow each other through the stages. What stays idle while the pipeline fills and drains is its
*bubble*. The order in which a stage takes its forward and backward passes is the *schedule*. GPipe does all forward
passes, then all backward passes (Huang et al., 2019), and must keep the input of every micro-batch until its backward
pass. 1F1B takes a backward pass as soon as it can: after a few forward passes to warm up, one forward and one backward
pass in turn (Narayanan et al., "PipeDream", 2019; flushed at the end of each batch as in Megatron-LM, 2021). Its bubble
is the same, but stage s of p never keeps more than p - s micro-batches.

A stage keeps its inputs alone, and computes the forward pass once more in the backward pass (Chen et al., "Training
Deep Nets with Sublinear Memory Cost", 2016). The gradient of what a stage received is the gradient of what the stage
before has sent: with y the result and g = dL/dy, dL/dw is the gradient of sum(y * g), in which g is data.
"""

import numpy as np
from operators import cross_entropy
from program import Program
from values import gradients, placeholder, reshape, total


def gpipe(stages, micro_batches):
    """For each stage the list of its steps: ["forward", m] or ["backward", m], micro-batches in order in both."""
    ### BEGIN SOLUTION
    steps = [[kind, m] for kind in ("forward", "backward") for m in range(micro_batches)]
    return [list(steps) for _ in range(stages)]
    ### END SOLUTION


def one_f_one_b(stages, micro_batches):
    """As `gpipe`: stage s first takes stages - 1 - s forward passes (or all, if there are fewer), then one forward and
    one backward pass in turn, and at last the backward passes that remain."""
    ### BEGIN SOLUTION
    schedule = []
    for stage in range(stages):
        warm_up = min(stages - 1 - stage, micro_batches)
        steps = [["forward", m] for m in range(warm_up)]
        for m in range(micro_batches - warm_up):
            steps += [["forward", warm_up + m], ["backward", m]]
        steps += [["backward", m] for m in range(micro_batches - warm_up, micro_batches)]
        schedule.append(steps)
    return schedule
    ### END SOLUTION


def simulate(schedule, forward, backward):
    """(time, idle): when the last step ends, and the share of all stages' time in which they do nothing.

    Each step takes `forward` or `backward` seconds and messages take none. A stage takes its steps in order, each as
    soon as it can: a forward pass needs that of the stage before, a backward pass that of the stage after, for the same
    micro-batch. ValueError for a schedule in which the stages wait for each other forever.
    """
    ### BEGIN SOLUTION
    ended, next_step, free = {}, [0] * len(schedule), [0.0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for stage, steps in enumerate(schedule):
            if next_step[stage] == len(steps):
                continue
            kind, m = steps[next_step[stage]]
            other = stage - 1 if kind == "forward" else stage + 1
            if 0 <= other < len(schedule) and (kind, other, m) not in ended:
                continue
            start = max(free[stage], ended.get((kind, other, m), 0.0))
            free[stage] = ended[kind, stage, m] = start + (forward if kind == "forward" else backward)
            next_step[stage] += 1
            moved = True
    if any(done < len(steps) for done, steps in zip(next_step, schedule)):
        raise ValueError("the stages of this schedule wait for each other")
    busy = sum(forward if kind == "forward" else backward for steps in schedule for kind, _ in steps)
    return max(free), 1 - busy / (max(free) * len(schedule))
    ### END SOLUTION


def most_kept(steps):
    """The largest number of micro-batches that a stage with these steps has taken forward and not yet backward."""
    ### BEGIN SOLUTION
    kept = most = 0
    for kind, _ in steps:
        kept += 1 if kind == "forward" else -1
        most = max(most, kept)
    return most
    ### END SOLUTION


class Stage:
    """Some layers in a row, for micro-batches of one size. The last stage has the loss, too.

    `forward(weights, x)` is the result. `backward(weights, x, g)` is (loss, dL/dx, {name: dL/dw}), where g is dL/dy, or
    for the last stage the rows of 0 and 1 that say the classes. Others have no loss: None.
    """

    def __init__(self, network, shapes, input_shape, last):
        self.last, self.x = last, placeholder(size=input_shape)
        self.w = {name: placeholder(size=shape) for name, shape in shapes.items()}
        y = network(self.x, self.w)
        self.output_shape, self.g = y.shape, placeholder(size=y.shape)
        ### BEGIN SOLUTION
        if last:
            loss = cross_entropy(y, self.g)
        else:
            loss = reshape(total(y * self.g, axes=range(len(y.shape))), size=())
        self.forward_program = Program([y])
        self.backward_program = Program([loss, *gradients(loss, [self.x, *self.w.values()])])
        ### END SOLUTION

    def feeds(self, weights, x):
        return {self.x: x} | {self.w[name]: array for name, array in weights.items()}

    def forward(self, weights, x):
        return self.forward_program.run(self.feeds(weights, x))[0]

    def backward(self, weights, x, g):
        ### BEGIN SOLUTION
        loss, dx, *found = self.backward_program.run(self.feeds(weights, x) | {self.g: g})
        return float(loss) if self.last else None, dx, dict(zip(self.w, found))
        ### END SOLUTION


def run(comm, stage, weights, steps, x, t):
    """One step of training on this rank's `stage`, in the order `steps`: (loss, {name: gradient}) of the whole batch.

    Rank s of `comm` has stage s. `x` is the list of the micro-batches' images, which the first rank uses, and `t` that
    of their classes in rows of 0 and 1, for the last. Both lists are known to all. Loss and gradients are means over
    the micro-batches; ranks but the last return None for the loss. Results go to the next rank and gradients to the one
    before, by `comm.send(to, array)` and `comm.recv(source)`, which returns the next array of that rank. An input is
    forgotten after its backward pass.
    """
    ### BEGIN SOLUTION
    first, kept, losses, sums = comm.rank == 0, {}, [], {}
    for kind, m in steps:
        if kind == "forward":
            kept[m] = x[m] if first else comm.recv(comm.rank - 1)
            if not stage.last:
                comm.send(comm.rank + 1, stage.forward(weights, kept[m]))
            continue
        g = t[m] if stage.last else comm.recv(comm.rank + 1)
        loss, dx, found = stage.backward(weights, kept.pop(m), g)
        losses.append(loss)
        sums = {name: sums.get(name, 0) + array for name, array in found.items()}
        if not first:
            comm.send(comm.rank - 1, dx)
    return (float(np.mean(losses)) if stage.last else None), {name: array / len(x) for name, array in sums.items()}
    ### END SOLUTION
