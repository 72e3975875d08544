"""Which updates of a graph servers can make, whether they had better, and the nodes by which a worker has them made.

An optimizer's rule needs only a gradient, so a server that keeps the variable and the rule's state can make the update.
No worker needs all of a table that is only looked up by id (S. Kim et al., "Parallax: Sparsity-aware Data Parallel
Training of Deep Neural Networks", EuroSys 2019). A strategy decides which of these variables it gives to servers: by
the bytes that a step moves if ranks keep it, and if servers do. A dense gradient moves fewer bytes in an all-reduce.
The gradient of a few looked-up rows only goes to a server and back; without servers every rank gathers the rows of all
others, or adds up whole gradients where those are fewer bytes, and keeps the whole table and its optimizer state. Left
out: the bytes of activations, and the savings of a cache, which only a run shows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..core.errors import ArgumentError, GradientError
from ..core.graph import OPS, Node, origin_of, readers_of, remade, topological
from ..core.op import Op, Role
from ..core.types import Dim, show_shape
from ..ops.shape import reshape
from ..ps.store.partition import Parameter
from ..ps.store.rules import described
from ..ranges import AtLeast1, Count
from .push_pull import Tables, descend_rows, pull, pull_bags, pull_rows, push, push_rows, set_rate, tick


class Servable:
    """The variables of a graph whose updates servers can make: `steps` holds a rule's node of each.

    Sub-graphs may each have one of a variable, `every`.
    """

    def __init__(self, outputs: Sequence[Node]) -> None:
        self.nodes, self.outputs = topological(outputs), frozenset(outputs)
        rules = [n for n in self.nodes if n.op.update is not None and n.inputs[0].role is Role.VARIABLE]
        steps = [n for n in rules if not n.op.update.of(n).whole]
        self.steps = {n.inputs[0]: n for n in steps}
        self.every = {v: [n for n in steps if n.inputs[0] is v] for v in self.steps}

    def check(self, updates: Mapping[Node, Node]) -> None:
        """ArgumentError for a trained variable whose update servers cannot make: each worker would train a copy."""
        for variable, value in updates.items():
            if variable.attrs["trainable"] and variable not in self.steps:
                step = value.inputs[0] if value.role is Role.ITEM else value
                why = "it is no update operator, see ht.optim.update_rule"
                if step.op.update is not None:
                    why = step.op.update.of(step).whole or "it does not update the variable itself"
                raise ArgumentError(
                    f"servers cannot apply {step.op.name} to {variable.name!r}: {why}",
                    fix="use a rule of single elements, or keep the variable on ranks: hetu.strategies.Hybrid",
                    site=step.site,
                )

    def check_read(self, variables: Collection[Node]) -> None:
        """ArgumentError where a worker reads the new value of one of the variables that servers keep."""
        steps = {step: v for v in variables for step in self.every[v]}
        for node in self.nodes:
            for i in node.inputs if node.role is not Role.ITEM else ():
                if (step := i.inputs[0] if i.role is Role.ITEM else i) in steps:
                    how = "as where a loss scale decides whether it is taken, or an average follows it"
                    raise _read(steps[step], f"{node.op.name} reads it on a worker, {how}", step)

    def check_fetched(self, fetches: Sequence[Node], variables: Collection[Node]) -> None:
        """ArgumentError where the new value of one of the variables that servers keep is fetched, or what it makes."""
        for node in topological(fetches):
            if node.op.update is not None and node.inputs[0] in variables:
                raise _read(node.inputs[0], "a step fetches it on a worker", node)

    def check_growing(self, tables: Collection[Node]) -> None:
        """ArgumentError for a table without a bound that is not among these, which servers keep."""
        for v in (v for v in self.nodes if "grows" in v.tags and v.role is Role.VARIABLE and v not in tables):
            step = self.steps.get(v)
            why, fix = "no update that servers can make trains it", "keep its training step in the graph"
            if step is not None:
                why = f"{step.op.name} changes all its rows"
                fix = "use no weight_decay=, clip_norm=, penalty or sum of batches"
            raise ArgumentError(f"{v.name!r} has no bound of its rows, but {why}", fix=fix, site=v.site)

    def check_steps(self, kept: Sequence[Node], whole: Collection[Node], updated: Mapping[str, Sequence[str]]) -> None:
        """ArgumentError where servers would update what they keep otherwise than one process; `whole` are tables of
        which that one would move all rows, and `updated` what each sub-graph updates."""
        for variable in whole:
            if not (step := self.steps[variable]).op.update.descends(step):  # which leaves other rows alone
                raise ArgumentError(
                    f"without the pass sparsify_updates {step.op.name} moves all rows of {variable.name!r}, and "
                    "servers move only those that are looked up",
                    fix="list it in passes=, or keep the table on ranks",
                    site=variable.site,
                )
        for variable in kept:
            step, count = self.steps[variable], self.step_count(variable)
            counts = (name for name, names in updated.items() if count is not None and count.name in names)
            for name in (name for name in counts if variable.name not in updated[name]):
                raise ArgumentError(
                    f"the sub-graph {name!r} counts a step of the {step.op.name} that also updates {variable.name!r}, "
                    "but not there: servers count the steps of each variable",
                    fix="train by an optimizer of its own what takes turns",
                    site=step.site,
                )

    @cached_property
    def tables(self) -> set[Node]:
        """The variables that are only looked up by id, and not fetched."""
        return {v for v in self.steps if self._is_table(v)}

    def _is_table(self, variable: Node) -> bool:
        steps = self.every[variable]
        if variable in self.outputs or not all(map(scattered, steps)):
            return False
        readers = [n for n in self.nodes if variable in n.inputs and n not in steps]
        return all(n.role is Role.SCATTER or is_lookup(n, (variable,)) for n in readers)

    def slots(self, variables: Collection[Node]) -> list[Node]:
        """The state of these variables' rules, which servers also keep, in the rules' order."""
        steps = [self.steps[v] for v in variables]
        return [i for n in steps for i in n.inputs[1 : n.op.update.tables]]

    def step_count(self, variable: Node) -> Node | None:
        """The variable that counts the updates of this one; None if its rule does not need the count."""
        return next(self._counts(self.steps[variable]), None)

    def _counts(self, step: Node) -> Iterator[Node]:
        counts = topological([step.inputs[-1]]) if step.op.update.timed else []
        return (n for n in counts if n.role is Role.VARIABLE)

    def parameter(self, variable: Node, *, sparse: bool, reduce: str, cached: bool = False) -> Parameter:
        """The parameter that servers keep for a variable. Workers send finished steps to a `cached` table."""
        step, shape, grows = self.steps[variable], known_shape(variable), variable.tags.get("grows")
        if cached:
            if not all(step.op.update.descends(step) for step in self.every[variable]):
                raise ArgumentError(
                    f"a cache for {variable.name!r}, whose update is {step.op.name}: a cache sends sums of finished "
                    "steps, of which servers could not keep that rule's state",
                    fix="train the tables by ht.optim.SGD, or use no cache",
                    site=step.site,
                )
            return Parameter(shape, variable.dtype.name, sparse, "add", reduce="sum", grows=grows)
        rule, options, _ = asked = self._asked(step)
        if any(self._asked(other) != asked for other in self.every[variable]):
            raise ArgumentError(
                f"sub-graphs train {variable.name!r} by different optimizers, of which servers keep one",
                fix="train it by one optimizer, or keep it on ranks: hetu.strategies.Hybrid",
                site=step.site,
            )
        return Parameter(shape, variable.dtype.name, sparse, rule, options, reduce, grows=grows)

    def _asked(self, step: Node) -> tuple[dict[str, Any], dict[str, float], list[str]]:
        """The rule of an update, its rate unless that changes, and the names of the variables that it keeps."""
        rate, kept = rate_of(step), [*step.inputs[1 : step.op.update.tables], *self._counts(step)]
        options = {"learning_rate": float(rate.attrs["value"])} if rate.role is Role.CONSTANT else {}
        return described(step.op.update.of(step), step.op.name), options, [v.name for v in kept]


def _read(variable: Node, by: str, step: Node) -> ArgumentError:
    """The error where anybody but servers reads what they make of a variable."""
    return ArgumentError(
        f"servers make the new value of {variable.name!r}, but {by}",
        fix='keep the variable on ranks: hetu.strategies.Hybrid; precision="bfloat16" scales no loss',
        site=step.site,
    )


def known_shape(variable: Node) -> tuple[int, ...]:
    """The shape of a variable, which has no open sizes."""
    return tuple(size for size in variable.shape if not isinstance(size, Dim))


def rate_of(step: Node) -> Node:
    """The learning rate of an update."""
    rate: Node = step.inputs[step.op.update.tables + 1]
    return rate


def gradient_of(step: Node) -> Node:
    """The gradient of an update."""
    gradient: Node = step.inputs[step.op.update.tables]
    return gradient


def scattered(step: Node) -> list[Node]:
    """The rows, one entry for each lookup, whose sum is the gradient of an update; none if it is not such a sum."""
    found, rest = list[Node](), [gradient_of(step)]
    while rest:
        node = rest.pop()
        if node.role is Role.SCATTER:
            found.append(node)
        elif node.op.ufunc == "add" and all(i.type == node.type for i in node.inputs):
            rest += node.inputs[::-1]
        else:
            return []
    return found


def is_lookup(node: Node, tables: Collection[Node]) -> bool:
    """Whether a node takes rows of one of the tables."""
    return node.role is Role.LOOKUP and node.inputs[0] in tables


def bags_of(
    nodes: Sequence[Node], outputs: Sequence[Node], tables: Collection[Node]
) -> dict[Node, tuple[Node, Node | None]]:
    """The nodes that sum up bags of rows of tables, and of each its lookup and weights: of lookups by a vector of ids
    whose rows, as they are or each times a weight, nothing else reads."""
    readers, found = dict[Any, list[Any]](readers_of(nodes, outputs)), dict[Node, tuple[Node, Node | None]]()
    for lookup in (n for n in nodes if is_lookup(n, tables) and n.inputs[1].ndim == 1):
        ways, each = list[tuple[Any, Node, Node | None]](), (*lookup.shape[:1], *[1] * (lookup.ndim - 1))
        for node in readers[lookup]:
            others = [] if node is None else [i for i in node.inputs if i is not lookup]
            if others and node.op.ufunc == "multiply" and (others[0].shape, node.type) == (each, lookup.type):
                ways += ((reader, node, others[0]) for reader in readers[node])
            else:
                ways.append((node, lookup, None))
        if all(getattr(n, "role", None) is Role.SCATTER and n.inputs[2] is rows for n, rows, _ in ways):
            found |= {n: (lookup, weights) for n, _, weights in ways}
    return found


class ServerCalls:
    """Makes the communication of one graph with its servers: a request for each table, which `together` joins.

    `names` are those that variables have on the servers, `rows` the rows there of each table. Of the `pooled` tables
    servers sum up bags.
    """

    def __init__(self, names: Mapping[str, str], rows: Mapping[Node, slice], pooled: Collection[Node] = ()) -> None:
        self.names, self.rows, self.pooled, self.order = names, rows, pooled, 0

    def look_up(self, outputs: Sequence[Node]) -> tuple[Node, ...]:
        """The graph with the lookups in tables turned into pulls of rows, or of sums of bags of them."""
        nodes, new = topological(outputs), dict[Node, Node]()
        bags = bags_of(nodes, outputs, self.pooled)
        inner = {inside for node, (lookup, _) in bags.items() for inside in (lookup, node.inputs[2])}
        for node in (n for n in nodes if n not in inner):
            with origin_of(node):
                if node in bags:
                    new[node] = self._pull_bags(node, *bags[node], new)
                elif is_lookup(node, self.rows):
                    new[node] = self._pull_rows(node.inputs[0], new[node.inputs[1]])
                else:
                    new[node] = remade(node, tuple(new[i] for i in node.inputs))
        return tuple(new[o] for o in outputs)

    def _pull_rows(self, table: Node, ids: Node) -> Node:
        attrs = {"tables": self._tables(table), "row": table.shape[1:], "dtype": table.dtype}
        return OPS["item"](self._make(pull_rows, (ids,), self.names[table.name], **attrs), index=0)

    def _pull_bags(self, node: Node, lookup: Node, weights: Node | None, new: Mapping[Node, Node]) -> Node:
        """The sums of bags, in the place of a node that adds rows up where the numbers of their bags say."""
        table, ids = lookup.inputs
        given = [new[ids], new[node.inputs[1]]]
        given += [] if weights is None else [reshape(new[weights], weights.shape[:1])]
        attrs = {"tables": self._tables(table), "shape": node.shape, "dtype": table.dtype}
        return self._make(pull_bags, given, self.names[table.name], **attrs)

    def _tables(self, table: Node) -> Tables:
        """A table as operators know it."""
        return ((table.name, (rows := self.rows[table]).start, rows.stop - rows.start),)

    def push(self, variables: Sequence[Node], steps: Sequence[Node], *, cached: bool) -> list[Node]:
        """The nodes that send a bundle's gradients, and its rate if that changes; `steps` are the new values."""
        steps = [step.inputs[0] if step.role is Role.ITEM else step for step in steps]
        rate, name, sent = rate_of(steps[0]), self.names[variables[0].name], list[Node]()
        if rate.role is not Role.CONSTANT and not cached:
            sent.append(self._make(set_rate, (rate,), name))
        if variables[0] not in self.rows:
            return [*sent, self._make(push, [gradient_of(step) for step in steps], name)]
        operator, more = (descend_rows, (rate,)) if cached else (push_rows, ())
        for variable, step in zip(variables, steps):
            if not (parts := scattered(step)):
                gradient = gradient_of(step)
                raise GradientError(f"the gradient of table {variable.name!r} is no longer one of rows: {gradient!r}")
            tables = self._tables(variable)
            sent += (self._make(operator, (*part.inputs[1:], *more), name, tables=tables) for part in parts)
        return sent

    def tick(self, sent: Sequence[Node], nodes: Sequence[Node] = ()) -> Node:
        """The end of the clock: after all pushes, whose arrays it keeps alive, and all communication among `nodes`."""
        self.order = max([self.order, *(n.attrs["order"] for n in nodes if n.role is Role.COMMUNICATION)])
        return self._make(tick, (*sent, *(i for node in sent for i in node.inputs)), "")

    def pull(self, ticked: Node, variable: Node, shape: tuple[int, ...]) -> Node:
        """The new value of what has the name of this variable on the servers."""
        return self._make(pull, (ticked,), self.names[variable.name], shape=shape, dtype=variable.dtype)

    def _make(self, op: Op[..., Any], inputs: Sequence[Node], parameter: str, **attrs: Any) -> Node:
        self.order += 1
        return op.make(tuple(inputs), {"parameter": parameter, "order": self.order, **attrs})


ID_BYTES = 8
HEADER = ("variable", "shape", "ids per step", "bytes by ranks", "bytes by servers", "kept by")


@dataclass(frozen=True)
class Choice:
    """The bytes that all processes together send per step for a variable on ranks, and for one on servers.

    `lookups` is the number of ids per step on all ranks; None for a variable that every rank needs whole. Servers get a
    `named` variable in any case.

    >>> choice = Choice("table", (100_000, 16), 4, lookups=2048, ranks=4)
    >>> choice.by_ranks, choice.by_servers
    (442368, 294336)
    """

    name: str
    shape: tuple[int, ...]
    itemsize: AtLeast1
    lookups: Count | None
    ranks: AtLeast1
    named: bool = False

    @property
    def row_bytes(self) -> int:
        """A looked-up row and its id."""
        return ID_BYTES + math.prod(self.shape[1:]) * self.itemsize

    @property
    def by_ranks(self) -> int:
        """A ring sends every element of a sum 2 (n - 1) times, and gathered elements, such as rows, n - 1 times.

        Of a small table the sum and a count for each row are fewer bytes than the rows.
        """
        whole = 2 * (self.ranks - 1) * math.prod(self.shape) * self.itemsize
        if self.lookups is None:
            return whole
        counts = 2 * (self.ranks - 1) * self.shape[0] * self.itemsize
        return min(whole + counts, (self.ranks - 1) * self.lookups * self.row_bytes)

    @property
    def by_servers(self) -> int:
        """Each rank pushes and pulls all, or the distinct rows of its lookups and their ids.

        Of k ids at most n (1 - (1 - 1/n)^k) are distinct on average, which is the number for equally likely ids.
        """
        if self.lookups is None:
            return 2 * self.ranks * math.prod(self.shape) * self.itemsize
        count = self.shape[0]
        rows = round(-count * math.expm1(self.lookups / self.ranks * math.log1p(-1 / count))) if count > 1 else 1
        return 2 * self.ranks * rows * self.row_bytes

    @property
    def on_servers(self) -> bool:
        return self.named or (self.lookups is not None and self.by_servers < self.by_ranks)

    def row(self, on_servers: bool) -> tuple[str, ...]:
        """The row in the table of a placement, whose strategy may have decided otherwise."""
        lookups, kept = "all" if self.lookups is None else f"{self.lookups:,}", "servers" if on_servers else "ranks"
        return self.name, show_shape(self.shape), lookups, f"{self.by_ranks:,}", f"{self.by_servers:,}", kept


def choices(servable: Servable, batch_size: int, ranks: int, named: Collection[Node] = ()) -> dict[Node, Choice]:
    """The choice for each variable that servers could keep; they get those that are `named`."""

    def made(variable: Node) -> Choice:
        lookups = None
        if variable in servable.tables:
            ids = [n.inputs[1] for n in servable.nodes if is_lookup(n, (variable,))]
            lookups = sum(_size(i, batch_size) for i in ids)
        must = variable in named or "grows" in variable.tags
        return Choice(variable.name, known_shape(variable), variable.dtype.itemsize, lookups, ranks, must)

    return {v: made(v) for v in servable.steps}


def _size(node: Node, batch_size: int) -> int:
    """The elements of a node when every open size is that of the batch."""
    return math.prod(batch_size * s.coef if isinstance(s, Dim) else s for s in node.shape)
