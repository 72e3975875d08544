"""What learns by gradients: a mean loss over the rows of all workers, as a graph, and the ways to make it small.

By L-BFGS or Newton's method all workers add up value and gradient, each over its own rows, and make the same step. By
an optimizer of `ht.optim` they do so for each batch; with a `strategy` rows, and what is learned, lie as it says, and
`ht.fit` trains.
A sparse X is fed as bags of entries; where ranks take parts of batches, as rows that are filled up to one length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import numpy as np

from .. import ops
from ..core.autodiff import gradients
from ..core.errors import ArgumentError, UnknownNameError, did_you_mean
from ..core.executor import Executor
from ..core.graph import Node
from ..core.leaf import placeholder, scope, variable
from ..core.placement import STRATEGIES, attach, choice, way
from ..data.dataset import ArrayDataset
from ..data.loader import DataLoader
from ..dist.comm.comm import SerialComm
from ..optimizer import Optimizer
from ..ranges import AtLeast0, AtLeast1, OneOf, Seed
from ..training import fit
from .estimator import Estimator
from .inputs import Sparse
from .kept import kept
from .lbfgs import Newton, minimize
from .workers import Workers, total, workers_of

FLOATS = "float64"
Solver = Annotated[str, OneOf("lbfgs")] | Callable[[], Optimizer]


class Dense:
    """X in a graph, of the `nodes` that its `arrays` are fed to: products with tables (columns, n)."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes

    @staticmethod
    def arrays(rows: Any) -> dict[str, np.ndarray]:
        """What is fed, by its names."""
        return {"X": rows}

    def times(self, table: Node) -> Node:
        """(rows, n)."""
        return ops.matmul(self.nodes[0], table)

    def squares(self, table: Node) -> Node:
        """The same of the squares of X and of the table."""
        return ops.matmul(ops.square(self.nodes[0]), ops.square(table))


class Bags(Dense):
    """A sparse X, each row of which is a bag of entries."""

    @staticmethod
    def arrays(rows: Sparse) -> dict[str, np.ndarray]:
        return {"ids": rows.columns, "starts": rows.starts[:-1], "values": rows.values}

    def times(self, table: Node) -> Node:
        return ops.embedding_bag(table, *self.nodes)

    def squares(self, table: Node) -> Node:
        ids, starts, values = self.nodes
        return ops.embedding_bag(ops.square(table), ids, starts, ops.square(values))


class Padded(Dense):
    """A sparse X, each row of which is filled up to the length of the longest, so that a batch divides by rows."""

    @staticmethod
    def arrays(rows: Sparse) -> dict[str, np.ndarray]:
        counts = np.diff(rows.starts)
        shape = len(rows), max(1, int(counts.max(initial=0)))
        ids, values = np.zeros(shape, np.int64), np.zeros(shape)
        place = rows.rows, np.arange(len(rows.values)) - np.repeat(rows.starts[:-1], counts)
        ids[place], values[place] = rows.columns, rows.values
        return {"ids": ids, "values": values}

    def times(self, table: Node) -> Node:
        return ops.sum(self._rows(table), axis=1)

    def squares(self, table: Node) -> Node:
        return ops.sum(ops.square(self._rows(table)), axis=1)

    def _rows(self, table: Node) -> Node:
        return ops.embedding(table, self.nodes[0]) * ops.expand_dims(self.nodes[1], axis=-1)


Margins = Callable[..., Node]  # of X as one of these, and the variables, by name: (rows, outputs)
Loss = Callable[[Node, Node], Node]  # of margins and targets: (rows,)
Begin = Mapping[str, tuple[np.ndarray, float]]  # what is learned: its first values, and the penalty of half its squares


@dataclass(frozen=True)
class MeanLoss:
    """The mean of a `loss` over rows, as a graph: `fed` has the name, the shape of a row, and the dtype of each array,
    of X, then the targets and how often rows count. The functions make the same graph each time."""

    form: type[Dense]
    margins: Margins
    loss: Loss
    fed: tuple[tuple[str, tuple[int, ...], np.dtype], ...]

    def graph(self, begin: Mapping[str, tuple[np.ndarray, Any]]) -> tuple[Node, list[Node], list[Node]]:
        """The loss, what is learned and what is fed. `begin` has first values, and penalties of half the squares."""
        fed = [placeholder(name, (None, *shape), dtype) for name, shape, dtype in self.fed]
        *x, y, counts = fed
        with scope("ml"):
            variables = {name: variable(name, array) for name, (array, _) in begin.items()}
            mean = ops.mean(counts * self.loss(self.margins(self.form(x), **variables), y))
            for v, (_, penalty) in zip(variables.values(), begin.values()):
                mean = mean if penalty is None else mean + 0.5 * penalty * ops.sum(ops.square(v))
        return mean, [*variables.values()], fed


Learned = tuple[tuple[str, tuple[int, ...], bool], ...]


def learned(begin: Begin) -> Learned:
    """What a graph follows from: the name and the shape of each variable, and whether it has a penalty."""
    return tuple((name, array.shape, penalty != 0) for name, (array, penalty) in begin.items())


class Objective:
    """A mean loss over the rows of all workers, and its gradients; `learned` as the function of that name has it."""

    def __init__(self, mean: MeanLoss, learned: Learned) -> None:
        penalties = [variable(f"penalty of {name}", np.zeros(())) if has else None for name, _, has in learned]
        self.shapes = [shape for _, shape, _ in learned]
        begin = {name: (np.zeros(shape), penalty) for (name, shape, _), penalty in zip(learned, penalties)}
        loss, self.variables, self.fed = mean.graph(begin)
        told = [ops.reshape(node, (-1,)) for node in (loss, *gradients(loss, self.variables), ops.constant(1.0))]
        self.executor = Executor([ops.concat(told)], comm=SerialComm())
        arrays = self.executor.state.arrays  # which never move
        self.places = [arrays[v.name] for v in self.variables]
        self.penalties = [None if v is None else arrays[v.name] for v in penalties]
        ends = [0, *np.cumsum([*map(math.prod, self.shapes)]).tolist()]
        self.slices = [slice(*pair) for pair in pairwise(ends)]

    def begin(self, workers: Workers, begin: Begin) -> None:
        """Set first values and penalties."""
        self.workers = workers
        for place, penalty, (value, number) in zip(self.places, self.penalties, begin.values()):
            place[...] = value
            if penalty is not None:
                penalty[...] = number

    def __call__(self, feed: dict[Any, Any], rows: int) -> tuple[float, np.ndarray]:
        """Value and gradient, of `rows` rows that are fed, with the variables as they are; of none where this worker
        has none left."""
        own = self.executor.run(feed)[0] if rows else np.zeros(2 + self.slices[-1].stop)
        (sums,) = self.workers.sum(rows * own)
        sums /= sums[-1]
        return float(sums[0]), sums[1:-1]

    def at(self, x: np.ndarray, feed: dict[Any, Any], rows: int) -> tuple[float, np.ndarray]:
        """The same with the variables at x."""
        for place, part in zip(self.places, self.parts(x)):
            place[...] = part
        return self(feed, rows)

    @property
    def x(self) -> np.ndarray:
        return np.concatenate([*map(np.ravel, self.places)])

    def parts(self, x: np.ndarray) -> list[np.ndarray]:
        """A vector as the variables are."""
        return [x[part].reshape(shape) for part, shape in zip(self.slices, self.shapes)]


@dataclass(eq=False, repr=False)
class Learner(Estimator):
    """Base class of what is learned by gradients.

    `solver` is "lbfgs", or makes an optimizer: `ht.optim.FTRL`, or `functools.partial(ht.optim.FTRL, 0.1, l1=1.0)`,
    which makes `max_iter` passes over the rows in batches of `batch_size`, those of all workers together. With a
    `strategy`, an object or a name as an executor takes it, all ranks are given all rows, as `ht.fit` has it.
    """

    solver: Solver = dataclasses.field(default="lbfgs", kw_only=True)
    batch_size: AtLeast1 = dataclasses.field(default=256, kw_only=True)
    strategy: Any = dataclasses.field(default=None, kw_only=True)
    max_iter: AtLeast1 = dataclasses.field(default=100, kw_only=True)
    tol: AtLeast0 = dataclasses.field(default=1e-4, kw_only=True)
    random_state: Seed = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        given, kind = self.strategy, type(self.strategy)
        if kind is str and given not in STRATEGIES:
            raise UnknownNameError(f"there is no strategy {given!r:.80}", fix=did_you_mean(given, STRATEGIES))
        if kind is not str and all(rules.dispatch(kind) is rules.dispatch(object) for rules in (way, choice)):
            attach(given, [])  # which refuses it

    @property
    def workers(self) -> Workers:
        return Workers() if self.strategy is not None else workers_of(self.comm)

    def _learn(
        self,
        rows: np.ndarray | Sparse,
        targets: np.ndarray,
        weight: np.ndarray,
        margins: Margins,
        loss: Loss,
        begin: Begin,
        newton: Newton | None = None,
    ) -> dict[str, np.ndarray]:
        """What minimizes the mean `loss` and the penalties: half the squares of each variable times its number. L-BFGS
        gives way to Newton's method, where `newton` tells its steps, of all variables as one vector."""
        form = Dense if not isinstance(rows, Sparse) else Padded if callable(self.solver) else Bags
        count, summed = total(self.workers, [len(weight), weight.sum()])
        arrays = {**form.arrays(rows), "y": targets, "weight": weight * (count / summed)}
        fed = tuple((name, array.shape[1:], array.dtype) for name, array in arrays.items())
        by_optimizer = self._descended if self.strategy is None else self._trained
        solve = partial(self._minimized, newton) if self.solver == "lbfgs" else by_optimizer
        return dict(zip(begin, solve(MeanLoss(form, margins, loss, fed), begin, [*arrays.values()])))

    def _minimized(self, newton: Newton | None, mean: MeanLoss, begin: Begin, arrays: list[np.ndarray]) -> Any:
        """By L-BFGS."""
        if self.strategy is not None:
            raise ArgumentError("strategy= is that of an optimizer, not of L-BFGS", fix="pass solver=ht.optim.FTRL")
        with kept(Objective, mean, learned(begin)) as objective:
            objective.begin(self.workers, begin)
            feed, rows = dict(zip(objective.fed, arrays)), len(arrays[-1])
            found = minimize(lambda x: objective.at(x, feed, rows), objective.x, self.max_iter, self.tol, newton)
            del objective.workers  # others may come next
        self.n_iter_ = found.iterations
        return objective.parts(found.x)

    def _descended(self, mean: MeanLoss, begin: Begin, arrays: list[np.ndarray]) -> Any:
        """By an optimizer, each step with the gradients of all workers' parts of a batch."""
        optimizer, objective, rows = self._optimizer(), Objective(mean, learned(begin)), len(arrays[-1])
        objective.begin(self.workers, begin)
        named = zip(objective.variables, objective.shapes)
        slopes = [placeholder(f"slope of {v.name}", shape, FLOATS) for v, shape in named]
        updates = optimizer.apply(dict(zip(objective.variables, slopes)))
        step = Executor([updates], state=objective.executor.state, comm=SerialComm())
        steps = -(-int(total(self.workers, [rows])[0]) // self.batch_size)
        rng = np.random.default_rng((self.random_state, self.workers.rank))
        for _ in range(self.max_iter):
            for mine in np.array_split(rng.permutation(rows), steps):
                _, found = objective(dict(zip(objective.fed, (array[mine] for array in arrays))), len(mine))
                step.run(dict(zip(slopes, objective.parts(found))))
        return objective.places

    def _trained(self, mean: MeanLoss, begin: Begin, arrays: list[np.ndarray]) -> Any:
        """As `ht.fit` trains by the strategy, each batch divided among ranks."""
        loss, variables, nodes = mean.graph({name: (array, number or None) for name, (array, number) in begin.items()})
        entries: dict[str, list[Any]] = {"train": [loss, self._optimizer().minimize(loss, variables)]}
        entries["learned"] = variables
        executor = Executor(entries, seed=self.random_state, strategy=self.strategy, comm=self.comm)
        size = min(self.batch_size, len(arrays[-1]))
        options: dict[str, Any] = {"shuffle": True, "seed": self.random_state, "drop_last": True}
        loader = DataLoader(ArrayDataset(*arrays), size, **options)
        fit(executor, loader, epochs=self.max_iter, inputs=nodes, progress=False)
        return executor.run("learned")

    def _optimizer(self) -> Optimizer:
        made = self.solver() if callable(self.solver) else None
        if not isinstance(made, Optimizer):
            fix = "pass what makes an optimizer: ht.optim.FTRL, or functools.partial(ht.optim.FTRL, 0.1)"
            raise ArgumentError(f"solver={self.solver!r:.60} makes {made!r:.60}", fix=fix)
        self.n_iter_ = self.max_iter
        return made
