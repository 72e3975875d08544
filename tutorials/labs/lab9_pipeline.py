"""Lab 9: pipeline schedules. After tutorial 10.

A model is cut into `stages`, each on a rank of its own, and a batch into `parts`. A stage runs the forward pass ("F")
and later the backward pass ("B") of every part, one at a time, in an order that is fixed before: a list such as

    [("F", 0), ("F", 1), ("B", 0), ("B", 1)]

A part's forward pass needs that of the stage before, its backward pass needs that of the stage behind (on the last
stage, its own forward pass). Sending takes no time here.

Check yourself with `hetu lab check 9`.
"""


def all_forward(stage, stages, parts):
    """The simple order, as GPipe has it (Y. Huang et al., 2018): all forward passes, then all backward passes."""
    return [("F", k) for k in range(parts)] + [("B", k) for k in range(parts)]


def one_f_one_b(stage, stages, parts):
    """The order 1F1B (D. Narayanan et al., 2019) of a stage, counted from 0.

    A stage first runs as many forward passes as there are stages behind it (all, if there are fewer parts). From then
    on it runs a forward pass and a backward pass in turn, while there are forward passes left, then the backward passes
    that are left. Parts come in their order.
    """
    ### BEGIN SOLUTION
    ahead = min(stages - stage - 1, parts)
    order = [("F", k) for k in range(ahead)]
    for k in range(parts - ahead):
        order += [("F", ahead + k), ("B", k)]
    return order + [("B", k) for k in range(parts - ahead, parts)]
    ### END SOLUTION


def most_held(order):
    """The most parts whose forward pass has run and whose backward pass has not: so many activations are kept."""
    ### BEGIN SOLUTION
    held = most = 0
    for kind, _ in order:
        held += 1 if kind == "F" else -1
        most = max(most, held)
    return most
    ### END SOLUTION


def finished(orders, forward, backward):
    """The time at which the last pass ends, or None if a stage waits for ever for another.

    `orders` is a list with an order for each stage. `forward` and `backward` are the seconds of a pass on each stage.
    """
    ### BEGIN SOLUTION
    stages, done = len(orders), {}
    at, free = [0] * stages, [0.0] * stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            if at[stage] == len(order):
                continue
            kind, part = order[at[stage]]
            if kind == "F":
                needs = [("F", part, stage - 1)] if stage else []
            else:
                needs = [("F", part, stage)] + ([("B", part, stage + 1)] if stage + 1 < stages else [])
            if all(need in done for need in needs):
                start = max([free[stage], *(done[need] for need in needs)])
                free[stage] = done[kind, part, stage] = start + (forward if kind == "F" else backward)[stage]
                at[stage] += 1
                moved = True
    return max(free) if all(a == len(o) for a, o in zip(at, orders)) else None
    ### END SOLUTION


def bubble(stages, parts):
    """The part of the time for which a stage waits, if all passes of all stages take equally long (in either order)."""
    ### BEGIN SOLUTION
    return (stages - 1) / (parts + stages - 1)
    ### END SOLUTION
