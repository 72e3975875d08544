"""What can be made of updates before an executor commits them: summed over batches, averaged, or of groups by name.

All are graph to graph, so that every strategy trains by them as by what `minimize` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from .answers import AnswersCalls
from .core.errors import ArgumentError, UnknownNameError, did_you_mean, public
from .core.graph import OPS, Node, replace, tagged, topological
from .core.leaf import unique_name, variable
from .core.op import Role
from .core.operators import zeros_like
from .init import zeros
from .ops import astype, equal, where
from .optimizer import Optimizer, Updates

__all__ = ["Average", "accumulated", "by_name"]


@public
def accumulated(updates: Updates) -> tuple[Updates, Updates]:
    """Two kinds of steps: those that only add up gradients, and those that update by the mean of all since the last.

    List each in a sub-graph of its own, which an `ht.fit(accumulate=)` runs in turn: so many batches are one that is as
    large as all, where they are of one size. Statistics that a loss keeps, as those of batch norm, move at each step.
    Of a table all rows change. The state of the optimizer counts updates, not steps, and so do its schedules.
    Several workers of a `ParameterServer` save only after an update, as each has sums of its own: CheckpointError.

    >>> import hetu as ht
    >>> x, w = ht.placeholder("x", ()), ht.variable("w", 0.0, ())
    >>> add, update = accumulated(ht.optim.SGD(0.5).minimize(w * x))
    >>> ex = ht.Executor({"add": [add], "train": [update]})
    >>> for name, value in (("add", 1.0), ("train", 3.0)): _ = ex.run(name, {x: value}); print(float(ex.state[w]))
    0.0
    -1.0
    """
    if not isinstance(updates, Updates):
        raise ArgumentError(
            f"the gradients of updates that are a {type(updates).__name__} are not known",
            fix="pass what minimize(...) or apply(...) returned, or several of these as one: a | b",
        )
    with tagged(update=True):
        name = unique_name("accumulated")
        with tagged(pending=True):  # while it is not 0, a part of an update is in no trained variable
            seen = variable(f"{name}/batches", 0, (), "int64", trainable=False)
        sums = {p: _beside(p, f"{name}/gradient") for p in updates.gradients}
        totals = {p: sums[p] + g for p, g in updates.gradients.items()}
        means = {g: totals[p] / astype(seen + 1, p.dtype) for p, g in updates.gradients.items()}
        made = dict(zip(updates, replace([*updates.values()], means)))
        begun = {total: zeros_like(total) for total in sums.values()}
        added = {sums[p]: total for p, total in totals.items()}
    first = Updates({**added, seen: seen + 1}, updates.gradients)
    return first, Updates({**made, **begun, seen: zeros_like(seen)}, updates.gradients)


class Average(AnswersCalls):
    """An average of each trained variable over the steps, in which the weight of a step falls by `decay` a step.

    `follow` adds to updates that averages follow; `of` is a node in which they stand in the place of the variables, for
    sub-graphs that evaluate. The average of n steps is divided by 1 - decay^n, so that it begins with the first step's
    values. B. Polyak and A. Juditsky, 1992; with the decay of D. Kingma and J. Ba, ICLR 2015, section 7.2.

    >>> import hetu as ht
    >>> w = ht.variable("w", 0.0, ())
    >>> average = Average(0.5)
    >>> updates = average.follow(ht.optim.SGD(1.0).minimize(-w))  # w is 1, 2, 3 ...
    >>> ex = ht.Executor({"train": [updates], "eval": [average.of(w)]})
    >>> _ = ex.run("train"), ex.run("train")
    >>> round(float(ex.run("eval")[0]), 4)
    1.6667
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ArgumentError(f"decay={decay!r}", fix="pass a number between 0 and 1, such as 0.999")
        self.decay, self.name = decay, unique_name("average")
        self.weight = variable(f"{self.name}/weight", 0.0, (), "float64", trainable=False)
        self.averages: dict[Node, Node] = {}

    @public
    def follow(self, updates: Updates) -> Updates:
        """These updates, and those of the averages of the trained variables among them."""
        with tagged(update=True):
            moved = {}
            for p, new in updates.items():
                if p.attrs["trainable"]:
                    self.averages[p] = _beside(p, self.name)
                    moved[self.averages[p]] = self.decay * self.averages[p] + (1 - self.decay) * new
            weight = self.decay * self.weight + (1 - self.decay)
        return Updates({**updates, **moved, self.weight: weight}, updates.gradients)

    @public
    def of(self, node: Node) -> Node:
        """`node` as a function of the averages; of the variables themselves before the first step."""
        if not self.averages:
            raise ArgumentError("no updates are followed yet", fix="pass them first: average.follow(updates)")
        none = equal(self.weight, 0.0)
        found = {p: where(none, p, average / astype(self.weight, p.dtype)) for p, average in self.averages.items()}
        return replace([node], found)[0]


@public
def by_name(loss: Node, optimizers: Mapping[str, Optimizer | None]) -> Updates:
    """Updates of each trainable variable by the optimizer of the first pattern that fits its name; None freezes it.

    Rates that fall layer by layer, no decay of norms, frozen embeddings are all of this form. An optimizer that several
    patterns name has one step count and one `clip_norm` for all of them. UnknownNameError for a pattern that fits no
    variable, ArgumentError for a variable that no pattern fits.

    >>> import hetu as ht
    >>> with ht.scope("net"):
    ...     layer = ht.nn.Linear(3, 2)
    >>> loss = ht.sum(layer(ht.placeholder("x", (1, 3))))
    >>> updates = by_name(loss, {"*/bias": None, "net/*": ht.optim.SGD(0.1)})
    >>> [v.name for v in updates if v.attrs["trainable"]]
    ['net/linear/weight']
    """
    variables = [n for n in topological([loss]) if n.role is Role.VARIABLE and n.attrs["trainable"]]
    fitting = {v: next((p for p in optimizers if fnmatchcase(v.name, p)), "") for v in variables}
    names = [v.name for v in variables]
    for pattern in optimizers:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UnknownNameError(
                f"no variable has a name like {pattern!r}",
                fix=did_you_mean(pattern, names) or "the loss has no variables to train",
            )
    if left := [v.name for v, pattern in fitting.items() if not pattern]:
        raise ArgumentError(
            f"no pattern fits {', '.join(left)}", fix='add "*" as the last, with None to freeze the rest'
        )
    updates = Updates({}, {})
    for optimizer in dict.fromkeys(optimizers.values()):
        own = sorted((v for v, p in fitting.items() if optimizers[p] is optimizer), key=lambda v: v.serial)
        if optimizer is not None and own:
            made = optimizer.minimize(loss, own)
            updates = updates | made
    return updates


def _beside(p: Node, name: str) -> Node:
    """A variable of the shape and dtype of `p`, zero at first, which lies where `p` does."""
    full = f"{p.name}/{name}"
    return OPS["variable"](name=full, shape=p.shape, dtype=p.dtype, init=zeros, trainable=False)
