"""What learns by gradients: a mean loss over the rows of all workers, as a graph, and the ways to make it small.

By L-BFGS all workers add up value and gradient, each over its own rows, and make the same step. By an optimizer of
`ht.optim` they do so for each batch; with a `strategy` rows, and what is learned, lie as it says, and `ht.fit` trains.
A sparse X is fed as bags of entries; where ranks take parts of batches, as rows that are filled up to one length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from .lbfgs import minimize
from .workers import Workers, total, workers_of

FLOATS, IDS = "float64", "int64"
Solver = Annotated[str, OneOf("lbfgs")] | Callable[[], Optimizer]


class Dense:
    """X in a graph: the `nodes` that are fed, its `arrays`, and products with tables (columns, n)."""

    def __init__(self, rows: np.ndarray) -> None:
        self.nodes, self.arrays = [placeholder("X", (None, rows.shape[1]), FLOATS)], [rows]

    def times(self, table: Node) -> Node:
        """(rows, n)."""
        return ops.matmul(self.nodes[0], table)

    def squares(self, table: Node) -> Node:
        """The same of the squares of X and of the table."""
        return ops.matmul(ops.square(self.nodes[0]), ops.square(table))


class Bags:
    """A sparse X, each row of which is a bag of entries."""

    def __init__(self, rows: Sparse) -> None:
        self.nodes = [placeholder("ids", (None,), IDS), placeholder("starts", (None,), IDS)]
        self.nodes.append(placeholder("values", (None,), FLOATS))
        self.arrays = [rows.columns, rows.starts[:-1], rows.values]

    def times(self, table: Node) -> Node:
        return ops.embedding_bag(table, *self.nodes)

    def squares(self, table: Node) -> Node:
        ids, starts, values = self.nodes
        return ops.embedding_bag(ops.square(table), ids, starts, ops.square(values))


class Padded:
    """A sparse X, each row of which is filled up to the length of the longest, so that a batch divides by rows."""

    def __init__(self, rows: Sparse) -> None:
        counts = np.diff(rows.starts)
        shape = len(rows), max(1, int(counts.max(initial=0)))
        self.arrays = [np.zeros(shape, np.int64), np.zeros(shape)]
        place = rows.rows, np.arange(len(rows.values)) - np.repeat(rows.starts[:-1], counts)
        self.arrays[0][place], self.arrays[1][place] = rows.columns, rows.values
        self.nodes = [placeholder("ids", (None, shape[1]), IDS), placeholder("values", (None, shape[1]), FLOATS)]

    def times(self, table: Node) -> Node:
        return ops.sum(self._rows(table), axis=1)

    def squares(self, table: Node) -> Node:
        return ops.sum(ops.square(self._rows(table)), axis=1)

    def _rows(self, table: Node) -> Node:
        return ops.embedding(table, self.nodes[0]) * ops.expand_dims(self.nodes[1], axis=-1)


FedRows = Dense | Bags | Padded
Margins = Callable[..., Node]  # of a `FedRows` and the variables, by name: (rows, outputs)
Loss = Callable[[Node, Node], Node]  # of margins and targets: (rows,)


class Objective:
    """The mean over rows of all workers of a `loss` that is one over those of this worker, and its gradients."""

    def __init__(self, workers: Workers, loss: Node, variables: Sequence[Node]) -> None:
        self.workers, self.variables = workers, variables
        self.shapes = [tuple(map(int, v.shape)) for v in variables]
        self.executor = Executor([loss, *gradients(loss, variables)], comm=SerialComm())

    def __call__(self, feed: Mapping[Node, Any], rows: int) -> tuple[float, list[np.ndarray]]:
        """Of `rows` rows that are fed, with the variables as they are; of none where this worker has none left."""
        found = self.executor.run(dict[Any, Any](feed)) if rows else [0.0, *map(np.zeros, self.shapes)]
        sums = rows * np.concatenate([*map(np.ravel, found), [1.0]])
        (sums,) = self.workers.sum(sums)
        return float(sums[0] / sums[-1]), self.parts(sums[1:-1] / sums[-1])

    def at(self, x: np.ndarray, feed: Mapping[Node, Any], rows: int) -> tuple[float, np.ndarray]:
        """The same with the variables at x, as one vector, and so the gradient."""
        for v, part in zip(self.variables, self.parts(x)):
            self.executor.state[v] = part
        value, found = self(feed, rows)
        return value, np.concatenate([*map(np.ravel, found)])

    @property
    def x(self) -> np.ndarray:
        return np.concatenate([np.ravel(self.executor.state[v]) for v in self.variables])

    def parts(self, x: np.ndarray) -> list[np.ndarray]:
        ends = np.cumsum([*map(math.prod, self.shapes)])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(x, ends), self.shapes)]


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
        begin: Mapping[str, tuple[np.ndarray, float]],
    ) -> dict[str, np.ndarray]:
        """What minimizes the mean `loss` and the penalties: half the squares of each variable times its number."""
        bags = Padded if callable(self.solver) else Bags
        x = bags(rows) if isinstance(rows, Sparse) else Dense(rows)
        count, summed = total(self.workers, [len(weight), weight.sum()])
        y = placeholder("y", (None, *targets.shape[1:]), targets.dtype)
        counts = placeholder("weight", (None,), FLOATS)
        nodes, arrays = [*x.nodes, y, counts], [*x.arrays, targets, weight * (count / summed)]
        with scope("ml"):
            variables = {name: variable(name, array) for name, (array, _) in begin.items()}
            mean = ops.mean(counts * loss(margins(x, **variables), y))
            for v, (_, penalty) in zip(variables.values(), begin.values()):
                mean = mean + 0.5 * penalty * ops.sum(ops.square(v)) if penalty else mean
            solve = (
                self._minimized
                if self.solver == "lbfgs"
                else self._descended
                if self.strategy is None
                else self._trained
            )
            return dict(zip(variables, solve(mean, [*variables.values()], nodes, arrays)))

    def _minimized(self, loss: Node, variables: list[Node], nodes: list[Node], arrays: list[np.ndarray]) -> Any:
        """By L-BFGS."""
        if self.strategy is not None:
            raise ArgumentError("strategy= is that of an optimizer, not of L-BFGS", fix="pass solver=ht.optim.FTRL")
        objective, feed, rows = Objective(self.workers, loss, variables), dict(zip(nodes, arrays)), len(arrays[-1])
        found = minimize(lambda x: objective.at(x, feed, rows), objective.x, self.max_iter, self.tol)
        self.n_iter_ = found.iterations
        return objective.parts(found.x)

    def _descended(self, loss: Node, variables: list[Node], nodes: list[Node], arrays: list[np.ndarray]) -> Any:
        """By an optimizer, each step with the gradients of all workers' parts of a batch."""
        optimizer, objective, rows = self._optimizer(), Objective(self.workers, loss, variables), len(arrays[-1])
        fed = [placeholder(f"slope of {v.name}", shape, FLOATS) for v, shape in zip(variables, objective.shapes)]
        updates = optimizer.apply(dict(zip(variables, fed)))
        step = Executor([updates], state=objective.executor.state, comm=SerialComm())
        steps = -(-int(total(self.workers, [rows])[0]) // self.batch_size)
        rng = np.random.default_rng((self.random_state, self.workers.rank))
        for _ in range(self.max_iter):
            for mine in np.array_split(rng.permutation(rows), steps):
                slopes = objective(dict(zip(nodes, (array[mine] for array in arrays))), len(mine))[1]
                step.run(dict(zip(fed, slopes)))
        return [objective.executor.state[v] for v in variables]

    def _trained(self, loss: Node, variables: list[Node], nodes: list[Node], arrays: list[np.ndarray]) -> Any:
        """As `ht.fit` trains by the strategy, each batch divided among ranks."""
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
