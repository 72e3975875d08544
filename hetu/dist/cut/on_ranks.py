"""The placement of a strategy: this rank's variables and graphs, and the communicator.

It also has all ranks compare what they do, before anything waits (`agreement.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ... import checkpoint
from ...core.errors import ArgumentError, CheckpointError, FeedError, GraphError, HetuError
from ...core.executor import MADE, Executor
from ...core.graph import Graph, Node
from ...core.placement import Local, Placement, attaches
from ...core.program import Program
from ...core.state import FilePath, State
from ...core.types import Atom, Box
from ...look.html_table import rows_html
from ...passes import Pass, chosen_passes, simplify, sparsify_updates
from ...saving import Wanted, Writing, begin, fitting, opened
from ..comm.alike import FIX, FedAlike
from ..comm.comm import Comm, RankLostError
from ..comm.nccl import on_device
from ..comm.world import world
from .agreement import (
    Unlike,
    compare_calls,
    compare_feeds,
    compare_given,
    compare_graphs,
    compare_values,
    crc,
    fed_alike,
    named_by_any,
    of_first,
    together,
    unlike,
)
from .builders import ZeRO
from .coded import Saved, beside_plan, losses, recall, saved_losses
from .partition import partition
from .strategy import Builder, Strategy

T = TypeVar("T")
StepKey = tuple[Any, ...]  # what tells the programs of a rank apart: a sub-graph, and the shapes that it is fed
NOTHING = np.empty(0)
ANY = ZeRO(3)  # any number of ranks can do it, with as little memory as any strategy
LastPass = Callable[[Sequence[Node], Mapping[Node, Node], Sequence[Pass]], tuple[tuple[Node, ...], Mapping[Node, Node]]]


@attaches(Builder)
def on_ranks(builder: Builder, outputs: Sequence[Node], comm: Comm | None = None) -> OnRanks:
    """The strategy that `builder` writes for this graph, on the ranks of `comm` (those of the job by default).

    Where some were lost or have come, and it has none for so many, that of `ANY` is taken.
    """
    comm = world() if comm is None else comm
    for asked in (builder, ANY):
        try:
            strategy = asked.build(outputs, comm.world_size)
            strategy.check(outputs, comm.world_size)
            break
        except HetuError:
            if asked is ANY or not comm.regrouped:
                raise
    placement = OnRanks(strategy, comm, outputs)
    placement.builder = asked
    return placement


def spread(placement: Placement) -> OnRanks:
    """The placement, which is of a strategy on ranks. ArgumentError for any other, such as `Alone`."""
    if not isinstance(placement, OnRanks):
        raise ArgumentError(f"{placement!r} spreads nothing over ranks", fix="pass a strategy, say DataParallel()")
    return placement


def step_key(name: str, fed: Mapping[str, np.ndarray]) -> StepKey:
    """What tells the program of a step apart."""
    return name, *[value.shape for value in fed.values()]


def _as_it_is(
    fetches: Sequence[Node], updates: Mapping[Node, Node], then: Sequence[Pass]
) -> tuple[tuple[Node, ...], Mapping[Node, Node]]:
    return tuple(fetches), updates


class OnRanks:
    """A strategy for one graph on real ranks; `print(placement)` shows it as a table.

    A plan that must fit into memory puts a pass of its own in the place of `fitted`; one that was chosen says `why`.
    """

    ahead, late = 0, 0
    passes: Sequence[Pass] = (simplify, sparsify_updates)  # none that fuses: fused operators have no sharding rule
    why: Callable[[], Any]
    builder: Builder  # that has written the strategy
    source: Any = None  # what has chosen that, if it chooses anew for other ranks

    def __init__(self, strategy: Strategy, comm: Comm, outputs: Sequence[Node] = ()) -> None:
        self.strategy, self.comm, self.outputs = strategy, comm, tuple(outputs)
        self.in_parts = comm.world_size > 1 or comm.elastic
        self.fitted: LastPass = _as_it_is
        self.compared = dict[str, Any]()
        self.laid: tuple[Any, Callable[[int], Local]] | None = None  # the last graph, and what gives ranks their parts
        self.given: StepKey = ()  # of the last program that was made, and the names of its feeds
        self.feeds: Collection[str] = ()
        # Steps in which all ranks take part, and what is compared of them; one may look alone at what talks to nobody.
        self.shared: dict[StepKey, Sequence[tuple[str, FedAlike]]] = {}

    def __str__(self) -> str:
        return self.strategy.table(self.outputs)

    def _repr_html_(self) -> str:
        return rows_html(self.strategy.rows(self.outputs)) + self.strategy.shards(self.outputs)

    @cached_property
    def placeholders(self) -> dict[str, Node]:
        """Those of all sub-graphs, by name."""
        return {n.name: n for n in Graph(self.outputs).leaves("placeholder")}

    @cached_property
    def fed_alike(self) -> list[tuple[str, FedAlike]]:
        """What of each feed this rank must be fed as others are, by the name of the feed; the last is of no feed."""
        given = [
            (name, (title, ranks, node.dtype if whole else None))
            for name, node in self.placeholders.items()
            for title, ranks, whole in fed_alike(self.strategy, name, self.comm)
        ] + [("", ("steps without a feed", range(self.comm.world_size), None))]
        return [(name, FedAlike(self.comm, *of)) for name, of in given if len(of[1]) > 1]

    def aside(self, order: Sequence[Node]) -> int:
        """Bytes that a rank has beside variables and the plan of a step of these instructions, at most."""
        return beside_plan(order)

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world_size(self) -> int:
        return self.comm.world_size

    def variable(self, node: Node) -> Node | None:
        """The variable that holds this rank's part of `node`; None if it has no part."""
        return self.strategy.local_variable(node, self.comm.rank)

    def start(self, state: State, asked: Mapping[str, Any]) -> None:
        """Every rank has made its own part of the initial values, so none is sent. GPUs talk over NCCL.

        ArgumentError on all ranks if they were asked for different things, or cannot make a step again.
        """
        if self.comm.elastic and (local := self.strategy.local):
            said = f"each rank is fed its own part of {local[0]!r}, which would be lost with it"
            raise ArgumentError(said, fix="feed the whole batch: leave out local=")
        try:
            self.comm.compile_alike()
            self.agree_on(asked, partial(unlike, self.comm))
        except RankLostError:
            if not self.comm.elastic:
                raise  # else it is met again by the vote that follows: `elastic.py`
        chosen = chosen_passes(asked["passes"], state.device.kind)
        self.passes = [run for run in self.passes if run in chosen or run is simplify]  # on which a cut relies
        self.comm = on_device(self.comm, state.device)

    def agree_on(self, asked: Mapping[str, Any], unlike: Unlike) -> None:
        """Compare with other ranks what this executor was asked for, its strategy, its variables and its graph."""
        graph, strategy = Graph(self.outputs), self.strategy
        given = {**asked, "kind of strategy": strategy.kind}
        given |= {f"variable {v.name!r}": f"{v.type}, read as {strategy.kept(v)}" for v in graph.leaves("variable")}
        fed = {f"feed {n.name!r}": strategy.feeds.get(n.name, strategy.whole) for n in graph.leaves("placeholder")}
        given |= {name: str(layout) for name, layout in fed.items()}
        constants = [c.attrs["value"] for c in graph.leaves("constant")]  # a graph shows only those of one number
        given |= {f"constant {n}": crc(value) for n, value in enumerate(constants) if value.size > 1}
        del given["updated"]  # variables and graphs say what differs there, and shorter
        compare_given(unlike, given | {"strategy": json.dumps(strategy.data())})  # nothing is left out
        compare_graphs(unlike, graph)

    def compare(self, state: State, name: str, fed: Mapping[str, np.ndarray]) -> None:
        """GraphError on all ranks if they have other values where they keep the same, of those that users gave them.

        What they are fed is compared beside the steps; see `comm/alike.py`.
        """
        self.comm.recorder.runs += 1
        if self.compared is not state.unseen:
            if differs := self.compare_values(state):
                raise GraphError(
                    f"the ranks have different values of {differs}",
                    fix="make, assign or load the same on all ranks; random numbers of NumPy need one seed",
                )
            self.compared = state.unseen
        if alike := self.shared.get(step_key(name, fed)):
            self.comm.compare_feeds([each.note(fed.get(feed, NOTHING), name) for feed, each in alike])

    def compare_values(self, state: State) -> str | None:
        """Which variable differs between ranks that keep the same part of it, in words.

        Only of those that users gave values since ranks last compared them: trained replicas may differ in last digits
        on unlike machines.
        """
        variables = [v for v in Graph(self.outputs).leaves("variable") if not self.strategy.is_served(v)]
        mine = sorted(v.name for v in variables if v.name in state.unseen)
        self.comm.at(f"{state.unseen[mine[0]]}, which gave {mine[0]!r} a value" if mine else None)
        try:
            unseen = named_by_any(self.comm, mine)
        finally:
            self.comm.at(None)
        differs = compare_values(self.comm, self.strategy, [v for v in variables if v.name in unseen], state)
        for name in () if differs else unseen:
            state.unseen.pop(name, None)
        return differs

    def expect(self, coming: Iterable[tuple[Program, Mapping[str, np.ndarray]]]) -> None:
        """Nothing is fetched ahead."""

    def sizes(self, sizes: Mapping[Atom, int], name: str, training: bool, fed: Mapping[str, Any]) -> Mapping[Atom, int]:
        """The sizes that a graph is made for, from those that are fed. FeedError on all ranks if it is not fed alike.

        Only the first step of these shapes compares what is fed: it costs a look at every number.
        """
        placeholders = [node for feed, node in self.placeholders.items() if feed in fed]
        self.given, self.feeds = step_key(name, fed), fed.keys()
        if differs := compare_feeds(self.comm, self.strategy, placeholders, fed):
            raise FeedError(f"the ranks are fed differently: {differs}", fix=FIX)
        return self.strategy.sizes(sizes, training)

    def cut(self, fetches: Sequence[Node], updates: Mapping[Node, Node], effects: Sequence[Node] = ()) -> Local:
        """This rank's part of a graph of global, known sizes; `effects` are those of `partition`.

        GraphError on all ranks if they disagree about the graph.
        """
        given = fetches, updates, effects
        compare_graphs(partial(unlike, self.comm), Graph((*fetches, *updates.values(), *effects)))
        if self.laid is None or self.laid[0] != given:  # a simulation asks for one part after the other
            self.laid = given, partition(self.strategy, *given)
        return self.laid[1](self.comm.rank)

    def last(
        self, fetches: Sequence[Node], updates: Mapping[Node, Node], then: Sequence[Pass]
    ) -> tuple[tuple[Node, ...], Mapping[Node, Node]]:
        """This rank's part as it will run, but for the passes `then`, once it is known to fit those of the others."""
        fetches, updates = self.fitted(fetches, updates, then)
        if compare_calls(self.comm, (*fetches, *updates.values()), bool(updates)):
            alike = [of for of in self.fed_alike if of[0] in self.feeds]
            self.shared[self.given] = alike or self.fed_alike[-1:]
        return fetches, updates

    def agree(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """The numbers that rank 0 has."""
        return of_first(self.comm, values)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, state: State, variables: Iterable[Node], path: FilePath, extra: Mapping[str, Any] | None) -> Writing:
        """Begin to write the variables to a file; to a folder where there are several ranks, or may be later."""
        return self.parts(state, variables, path, extra) if self.in_parts else begin(state, path, extra)

    def parts(
        self, state: State, variables: Iterable[Node], path: FilePath, extra: Mapping[str, Any] | None
    ) -> Writing:
        """Begin to write them to a folder, each rank its part; one rank writes each of several duplicates."""
        folder, variables, rank = Path(path), list(variables), self.comm.rank
        owners = {node: self._owners(node, number) for number, node in enumerate(variables)}
        number = self._of_first(lambda: checkpoint.begin(folder))
        mine = {n.name: state.arrays[n.name] for n in variables if rank in owners[n].values()}
        mine |= losses(state.arrays, self.comm.world_size)
        sizes = np.empty(self.comm.world_size, np.int64)
        self.comm.all_gather(np.array([self._together(lambda: checkpoint.part_size(number, mine))]), sizes)
        table: dict[str, Any] = {
            n.name: {"shape": n.shape, "dtype": n.dtype.name, "pieces": [(r, box) for box, r in owners[n].items()]}
            for n in variables
        }
        last = self._together(lambda: None if rank else self.last_of(folder, number, sizes.tolist(), table, extra))
        write = partial(checkpoint.write_one, folder, number, sizes.tolist(), rank, last)
        return Writing(mine, write, partial(self._written, state, folder, number))

    def last_of(
        self, folder: Path, number: int, sizes: list[int], table: dict[str, Any], extra: Mapping[str, Any] | None
    ) -> bytes:
        """The manifest of a save; only rank 0 asks for it."""
        return checkpoint.manifest(number, sizes, table, extra)

    def _written(self, state: State, folder: Path, number: int, act: Callable[[], T]) -> None:
        """Have all ranks write, or wait until they have written, and compare what they keep alike."""
        self._together(act)
        self._of_first(lambda: checkpoint.finish(folder, number))  # if none has seen all parts: files that others made
        if differs := self.compare_values(state):  # may appear late on a host
            raise CheckpointError(
                f"{folder} is written, but the ranks have different values of {differs}",
                fix="assign the same on all ranks; of duplicates the checkpoint has one",
            )

    def _owners(self, node: Node, number: int) -> dict[Box, int]:
        """Which rank writes which box of a variable; duplicates take turns, so that no rank writes everything."""
        holders: dict[Box, list[int]] = {}
        pieces = self.strategy.store(node).pieces(node.shape)
        copy = min(piece.copy for piece in pieces.values())  # copies may be cut differently, each is complete
        for rank, piece in pieces.items():
            if piece.copy == copy:
                holders.setdefault(piece.box, []).append(rank)
        return {box: ranks[number % len(ranks)] for box, ranks in holders.items()}

    def load(self, state: State, variables: Iterable[Node], path: FilePath, **of: Any) -> dict[str, Any]:
        """Set this rank's parts from a file or folder that any other strategy wrote; on all ranks or on none."""

        path = self.newest(path)

        def read() -> tuple[dict[str, np.ndarray], list[Saved], dict[str, Any]]:
            saved = opened(path)
            boxes = {name: wanted.box for name, wanted in self.taken(saved, variables, **of).items()}
            values = {name: saved.read(name, box) for name, box in boxes.items() if box is not None}
            return values, saved_losses(saved, self.comm.rank), saved.extra

        values, lost, extra = self._together(read)
        state.assign(values)
        recall({name: state.arrays[name] for name in values}, lost, self.comm.world_size)
        if differs := self.compare_values(state):
            raise CheckpointError(f"the ranks loaded different values of {differs}", fix="load one checkpoint on all")
        return extra

    def newest(self, path: FilePath) -> FilePath:
        """What all ranks read there; of numbered saves the last one that rank 0 sees."""
        if isinstance(path, checkpoint.Checkpoint):
            return path
        number = self._of_first(lambda: checkpoint.newest_number(path))
        return Path(path, str(number)) if number else Path(path)

    def taken(self, saved: checkpoint.Checkpoint, variables: Iterable[Node], **of: Any) -> dict[str, Wanted]:
        """What is taken of a checkpoint, with the boxes of this rank."""
        wanted = {v.name: Wanted(tuple(map(int, v.shape)), v.dtype.name, self.box(v)) for v in variables}
        return fitting(saved, wanted, **of)

    def box(self, node: Node) -> Box | None:
        """The part of a variable that this rank keeps, if any."""
        piece = self.strategy.piece(node, self.comm.rank)
        return None if piece is None else piece.box

    def boxes(self, node: Node) -> Mapping[int, Box] | None:
        """Which rank keeps which part of a variable; None where each has all of it."""
        pieces = self.strategy.store(node).pieces(node.shape) if self.strategy.kept(node).copied else {}
        found, whole = {rank: piece.box for rank, piece in pieces.items()}, tuple((0, size) for size in node.shape)
        return None if len(found) == self.comm.world_size and {*found.values()} == {whole} else found

    def _of_first(self, act: Callable[[], int | None]) -> int:
        """The number that rank 0 finds; CheckpointError on all ranks if it finds none."""
        number = np.array([self._together(act if self.comm.rank == 0 else int) or 0], np.int64)
        self.comm.broadcast(number)
        return int(number[0])

    def _together(self, act: Callable[[], T]) -> T:
        """What `act` returns on this rank; CheckpointError on all ranks if it fails on one."""
        fix = "nothing was saved or loaded on any rank; see there"
        return together(self.comm, act, CheckpointError, fix, (CheckpointError, OSError))


def check_shared(executor: Executor) -> None:
    """ArgumentError for values of an executor by whose strategy ranks keep other parts of the variables."""
    placement, known = executor.placement, executor.state.boxes
    for node in executor.variables:
        mine = placement.boxes(node) if isinstance(placement, OnRanks) else None
        if (theirs := known.setdefault(node.name, mine)) != mine:
            rank, whole = placement.rank, "all of it on each rank"
            had, has = (whole if of is None else f"{of.get(rank, 'nothing')} on rank {rank}" for of in (theirs, mine))
            raise ArgumentError(
                f"{node.name!r} is kept as {had} in the shared state, and as {has} here",
                fix="share state= between executors of one strategy; save and load lead to another",
                site=node.site,
            )


MADE.append(check_shared)
