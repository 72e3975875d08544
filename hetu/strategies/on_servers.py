"""One rank's part of a graph of which servers keep variables: optimizer steps become pushes, a tick and pulls.

For every variable that servers keep, the update is cut out of the graph: its gradient is pushed, the servers apply the
same rule, and the new value is pulled straight into the variable. A table that is only looked up has no copy here:
lookups pull the rows of the batch, gradients push them. The rest is cut among the ranks as without servers.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from ..checkpoint import Checkpoint
from ..codec import Compress
from ..core.errors import ArgumentError, CheckpointError
from ..core.graph import Node, origin_of, topological
from ..core.leaf import seed_of
from ..core.op import Role
from ..core.placement import Local, Placement, attaches
from ..core.program import Program
from ..core.state import FilePath, State, initial_value
from ..core.types import Atom
from ..dist.comm.alike import of_shape, sampled
from ..dist.comm.comm import Comm, SerialComm
from ..dist.comm.world import world
from ..dist.cut.agreement import compare_given, crc, unlike
from ..dist.cut.on_ranks import StepKey, step_key
from ..init import law_of
from ..look.columns import in_columns
from ..look.html_table import rows_html
from ..passes import Pass, chosen_passes, simplify, sparsify_updates
from ..ps.store.first_values import Drawn, FirstValues, Given
from ..ps.store.partition import Parameter
from ..ps.store.placed import Placed
from ..ps.store.rules import name_of
from ..ps.wire.client import Client
from ..ps.wire.environment import Place, connect, place
from ..ps.wire.rows import Rows
from ..saving import Wanted, Writing, opened
from .apart import Apart, agreed, unlike_first
from .bundles import Bundle, KeptBundle, bundled, free_after, free_gone, new_name
from .hybrid import Hybrid
from .push_pull import requests, together
from .room import beside_plan
from .servable import HEADER, Servable, ServerCalls, choices, known_shape, rate_of
from .serving import Serving


class Connected:
    """A communicator with a connection to the servers, to which the operators of both are bound.

    As an executor's `comm=` it identifies a rank that `heturun` did not start: `Connected(Place(0, 2), client)` if the
    ranks know the servers only, otherwise with the communicator of the ranks.
    """

    def __init__(self, comm: Comm | Place, client: Client | None = None, rows: Rows | None = None) -> None:
        self.comm, self.client, self.rows = comm, client, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)


@attaches(Hybrid)
@attaches(Serving)
def on_servers(
    builder: Hybrid | Serving, outputs: Sequence[Node], comm: Comm | Place | Connected | None = None
) -> Placement:
    """The strategy that `builder` writes for this graph, on the ranks of `comm` (those of the job by default)."""
    ranks = comm if comm is not None else place() if builder.apart else world()
    strategy = builder.build(outputs, ranks.world_size)
    strategy.check(outputs, 1 if strategy.apart else ranks.world_size)
    return OnServers(strategy, ranks if isinstance(ranks, Connected) else Connected(ranks), outputs)


class OnServers(Apart):
    """A strategy for one graph on real ranks and servers; `print(placement)` shows where variables are, and why."""

    passes: Sequence[Pass] = (simplify,)  # before the updates are cut out
    strategy: Serving
    comm: Any  # `Connected`, once it has started

    def __init__(self, strategy: Serving, worker: Connected, outputs: Sequence[Node]) -> None:
        self.worker, self.ranks = worker, worker.comm
        peers = SerialComm() if strategy.apart else worker.comm
        if isinstance(peers, Place):
            fix = "pass a communicator, comm=Connected(comm, client), or use ParameterServer()"
            raise ArgumentError(f"the ranks of {peers} keep variables, but cannot talk to each other", fix=fix)
        super().__init__(strategy, peers, outputs)
        self.in_parts = True
        self.servable, self.fed, self.by_rows = Servable(outputs), False, True
        self.tells, self.training = False, set[StepKey]()  # whether servers are told what its steps are fed, and which
        self.number = 0  # of what they train
        self.kept = [v for v in self.servable.steps if strategy.is_served(v)]
        self.homes: dict[Node, Any] = {v: strategy.kept(v) for v in self.kept}
        self.tables = {v for v in self.kept if not self.homes[v].copied}
        self.servable.check_read(self.kept)
        self.servable.check_growing(self.tables)
        self.modes = {home.consistency for home in self.homes.values() if home.consistency}
        self.cached = {v: home.cache for v, home in self.homes.items() if home.cache}
        self.bundles = bundled(self.kept, partial(self._kind, {}, {}), self.tables)  # until it has started
        self.names = {v.name: b.variables[0].name for b in self.bundles for v in b.variables}  # on the servers
        self.ahead = max((cache.looks for cache in self.cached.values()), default=1)
        self.pooled = {v for v, home in self.homes.items() if home.pooled}

    def aside(self, order: Sequence[Node]) -> int:
        """Bytes beside the plan of a step: caches, and at most what its requests take until its clock has ended."""
        kept = {self._named(b): {v: self.homes[v] for v in b.variables} for b in self.bundles}
        return super().aside(order) + beside_plan(order, kept, self.rank)

    def _rows(self) -> list[tuple[str, ...]]:
        rated = choices(self.servable, self.strategy.batch_size, self.world_size)
        return [HEADER, *(choice.row(v in self.kept) for v, choice in rated.items())]

    def __str__(self) -> str:
        return "\n".join(in_columns(self._rows()))

    def _repr_html_(self) -> str:
        return rows_html(self._rows())

    # -- what an executor asks -----------------------------------------------------------------------------------

    def start(self, state: State, asked: Mapping[str, Any]) -> None:
        """Connect, create the parameters on servers with the initial values of one process, and fetch the copies."""
        self.comm.compile_alike()
        self.agree_on(asked, partial(unlike, self.comm))
        self.by_rows = sparsify_updates in chosen_passes(asked["passes"], state.device.kind)
        self.servable.check_steps(self.kept, self.tables if not self.by_rows else (), asked["updated"])
        client, strategy = self.worker.client or connect(), self.strategy
        free_gone(client)
        if self.modes:
            client.agree(max(self.modes, key=lambda mode: (mode.staleness, str(mode))))
        strategy.check_fresh(client.status()[0]["consistency"])
        # Ranks apart push gradients of their own losses: servers take the mean, but add the steps of a cache. Other
        # ranks push gradients of the loss of all ranks, which are summed.
        weight = 1 / self.world_size if strategy.apart else 1.0
        self.comm = Connected(self.comm, client, Rows(client, weight))
        made = {name: number for number, name in enumerate(state.copies)}
        kept = sorted(self.kept, key=lambda v: made.get(v.name, len(made)))  # a graph may name them in another order
        self.bundles = bundled(kept, partial(self._kind, asked["updated"], state.copies), self.tables)
        new = [b for b in self.bundles if self._is_new(b, client, state)]
        if self.kept and strategy.apart:
            goes_on = [self.names[v] for v in self.names if v in state.copies]
            self.agree_on({**asked, "what goes on from another executor": goes_on}, partial(unlike_first, client))
        self.number = of_shape(f"on servers {self.names}", ())
        values = {self._named(b): self._first(b, state) for b in new}
        client.create({self._named(b): self._parameter(b) for b in new}, values)
        free_after(state, map(self._named, new), client)
        cached = {self._named(b): self.cached.get(b.variables[0]) for b in self.bundles}
        self.comm.rows.hold({name: cache for name, cache in cached.items() if cache})
        state.copies |= self.names
        self._fetch(state)

    def _kind(self, updated: Mapping[str, Sequence[str]], copies: Mapping[str, str], variable: Node) -> Hashable:
        """What variables of a bundle have in common."""
        table, steps = variable in self.tables, self.servable.every[variable]
        alone = self._parameter(Bundle((variable,), table))
        if alone.grows:  # the rows of another cannot follow its own
            return variable
        parts = alone.placed and alone.placed.parts
        alone = replace(alone, shape=(0, *alone.shape[1:]) if table else (), seed=0, placed=None)
        where = tuple(name for name, names in updated.items() if variable.name in names)
        rates = tuple(float(r.attrs["value"]) if r.role is Role.CONSTANT else r for r in map(rate_of, steps))
        kept = repr(self.cached.get(variable)), copies.get(variable.name)
        return repr(alone), parts, where, rates, self.servable.step_count(variable), *kept

    def _is_new(self, bundle: Bundle, client: Client, state: State) -> bool:
        """Whether no executor of this state has made it; ArgumentError if one has servers train it otherwise."""
        name = state.copies.get(bundle.variables[0].name) or new_name(bundle.name, client)
        self.names |= {v.name: name for v in bundle.variables}
        made, wanted = client.parameters.get(name), self._parameter(bundle)
        if made is None or replace(made, generation=0) == wanted:
            return made is None
        site = bundle.variables[0].site
        if made.shape != wanted.shape:
            raise ArgumentError(
                f"servers keep {bundle.name} for another executor together with other variables, as that one updates "
                "them all in one step",
                fix="update them together, in sub-graphs of one executor, or without the other's state=",
                site=site,
            )
        told, asked = (f"{name_of(p.rule)} at {dict(p.options)}" for p in (made, wanted))
        raise ArgumentError(
            f"servers train {bundle.name!r} for another executor by {told}; that of this one, {asked}, is another",
            fix="train it by the same optimizer with the same numbers, or without the other's state=",
            site=site,
        )

    def _named(self, bundle: Bundle) -> str:
        """The name of a bundle on the servers."""
        return self.names[bundle.variables[0].name]

    def _first(self, bundle: Bundle, state: State) -> FirstValues:
        """First values are those of the state, or else, of a table, what its initializer says or makes."""

        def value(v: Node) -> np.ndarray:
            if v.name not in state:
                return initial_value(v, state.seed)
            array = state.arrays[v.name]  # sent as it lies, which nothing changes meanwhile
            return array if isinstance(array, np.ndarray) else state.contiguous(v.name)

        def rows(v: Node) -> Drawn | Given:
            shape = known_shape(v)
            law = None if v.name in state else law_of(v.attrs["init"], shape)
            return Given(lambda: value(v), shape) if law is None else Drawn(law, shape, seed_of(v, state.seed))

        if bundle.sparse:
            return [rows(v) for v in bundle.variables]
        return [Given(lambda: bundle.joined([value(v) for v in bundle.variables]), bundle.shape)]

    def _parameter(self, bundle: Bundle) -> Parameter:
        reduce, variable = "mean" if self.strategy.apart else "sum", bundle.variables[0]
        made = self.servable.parameter(variable, sparse=bundle.sparse, reduce=reduce, cached=variable in self.cached)
        told: dict[str, Any] = {**(self.homes[variable].compress or Compress()).of(sparse=bundle.sparse)}
        told["consistency"] = str(self.homes[variable].consistency) if len(self.modes) > 1 else ""
        placed = [p for v in bundle.variables if (p := self.homes[v].placed)]
        told["placed"] = Placed.joined(placed) if len(placed) > 1 else next(iter(placed), None)
        return replace(made, shape=bundle.shape, seed=crc32(variable.name.encode()), joined=bundle.joined_rows, **told)

    def _fetch(self, state: State) -> None:
        for bundle in (b for b in self.bundles if not b.sparse):
            arrays = [state.arrays[v.name] for v in bundle.variables]
            whole = self.comm.client.pull(self._named(bundle), arrays[0] if len(arrays) == 1 else None).wait()
            for array, part in zip(arrays, bundle.parts(whole)):
                array[...] = part

    def expect(self, coming: Iterable[tuple[Program, Mapping[str, np.ndarray]]]) -> None:
        """The rows of the next step are requested when this one has pushed; caches may choose by all that come."""
        self.comm.rows.expect(requests(*step) for step in coming)
        self.ahead = self.comm.rows.looks

    def sizes(self, sizes: Mapping[Atom, int], name: str, training: bool, fed: Mapping[str, Any]) -> Mapping[Atom, int]:
        """The sizes of this rank's part of the feeds if the ranks are apart; evaluation is not split."""
        found = super().sizes(sizes, name, training, fed)
        if not (training and self.strategy.apart):
            return found
        self.training.add(self.given)
        if not self.fed and isinstance(self.comm, Connected):  # it is not where a step is only simulated
            self._compare_fed(fed)
        own = ", or each worker its own, as bags need: ParameterServer(local_feeds=True)"
        return self.part_sizes(found, own)

    def _compare_fed(self, fed: Mapping[str, Any]) -> None:
        """ArgumentError under BSP unless the first batch is the one of which the first rank has taken its part."""
        self.fed, client = True, self.comm.client
        alike = {name: value for name, value in fed.items() if name not in self.strategy.local}
        given = {f"what {name!r} is fed": crc(np.asarray(value)) for name, value in alike.items()}
        told = unlike_first(client, json.dumps(given))
        waits = client.status()[0]["consistency"] == "bsp"
        self.tells = waits and not client.began  # a later life goes on with another batch
        if waits and not client.step:
            compare_given(lambda _: told, given, fix="feed all ranks the whole batch: each takes its part")

    def compare(self, state: State, name: str, fed: Mapping[str, np.ndarray]) -> None:
        """What ranks compare of a step; those apart tell the servers a number of it with the end of its clock."""
        super().compare(state, name, fed)
        if self.tells and step_key(name, fed) in self.training:
            client, number = self.comm.client, self.number ^ of_shape(name, ())
            for feed, value in fed.items():  # each goes on with the number of those before, as two may be one array
                told = number ^ of_shape(f"{feed} of {name}", value.shape)
                if feed not in self.strategy.local:
                    number = sampled(value, self.placeholders[feed].dtype, client.step, told)
            client.fed = number

    def cut(self, fetches: Sequence[Node], updates: Mapping[Node, Node], effects: Sequence[Node] = ()) -> Local:
        """This rank's graph: lookups pull rows, gradients are pushed, and the rest is as without servers."""
        if self.strategy.apart:
            self.servable.check(updates)
        self.servable.check_fetched(fetches, self.kept)
        rows = {v: place for b in self.bundles if b.sparse for v, (place, _) in zip(b.variables, b.places)}
        calls, sent = ServerCalls(self.names, rows, self.pooled), list[Node]()
        outputs = calls.look_up((*fetches, *updates.values()))
        new = dict(zip(updates, outputs[len(fetches) :]))
        pushed = [b for b in self.bundles if b.variables[0] in new]
        for bundle in reversed(pushed):
            first = bundle.variables[0]
            with origin_of(new[first]):
                steps = [new[v] for v in bundle.variables]
                sent += calls.push(bundle.variables, steps, cached=first in self.cached)
        rest = [v for v in new if not self.strategy.is_served(v)]
        outputs = (*outputs[: len(fetches)], *(new[v] for v in rest), *sent)
        outputs = sparsify_updates(outputs) if self.by_rows else outputs
        acting = len(fetches) + len(rest)
        new = dict(zip(rest, outputs[len(fetches) : acting]))
        local = together(super().cut(outputs[: len(fetches)], new, outputs[acting:]))
        if self.strategy.apart and updates:
            local = self.part_fed(local)
        if not sent:
            return local
        others, pushes = ([n for n in local.tokens if (n.op.collective == "served") == p] for p in (False, True))
        ticked = calls.tick(pushes, topological((*local.fetches, *local.tokens, *local.updates.values())))
        pulled = dict[Node, Node]()
        for bundle in pushed:
            if not bundle.sparse:
                whole = calls.pull(ticked, bundle.variables[0], bundle.shape)
                pulled |= zip(bundle.variables, bundle.part_nodes(whole))
        return replace(local, tokens=(*others, ticked), updates=local.updates | pulled)

    def agree(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """The numbers that all ranks go by. All ranks call this alike; if they are apart, it ends a clock.

        Ranks apart take the first values of a new parameter that nobody trains. Under BSP and SSP(0) these are the
        values of worker 0 as long as it takes part, because the others offer theirs only after it has ended the clock
        before which it offered its own. Under SSP(s) and ASP no rank waits, and they are those of the first rank to
        come. A server that is killed meanwhile may forget them before all have asked.
        """
        if not self.strategy.apart or self.world_size == 1:
            return super().agree(values)
        return agreed(self.comm.client, self.rank, values)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(self, state: State, variables: Iterable[Node], path: FilePath, extra: Mapping[str, Any] | None) -> Writing:
        """Write all variables to a folder: each rank its part of those on ranks, rank 0 those of the servers, at once.

        If ranks are apart, rank 0 writes all. Under BSP this is the state at this clock; under SSP and ASP others may
        go on training, and each parameter is as fresh as the mode promises a reader. CheckpointError if ranks that are
        apart hold parts of an update, such as gradients that are summed over batches.
        """
        for v in variables if self.strategy.apart and self.world_size > 1 else ():
            if v.tags.get("pending") and (count := int(state[v])):
                raise CheckpointError(
                    f"worker {self.rank} has summed gradients of {count} batches, which a checkpoint would not hold",
                    fix="save after the step that updates by them",
                )
        self.comm.rows.flush()
        if self.strategy.apart and self.rank:
            return Writing()
        self.comm.barrier()  # so that all pushes have arrived, even if the servers wait for no worker
        return self.parts(state, [v for v in variables if not self.strategy.is_served(v)], path, extra)

    def last_of(
        self, folder: Path, number: int, sizes: list[int], table: dict[str, Any], extra: Mapping[str, Any] | None
    ) -> bytes:
        """Write parts of what servers keep, and add them."""
        for bundle in self.bundles:
            self._kept(bundle).write(folder, number, sizes, table)
        return super().last_of(folder, number, sizes, table, extra)

    def load(self, state: State, variables: Iterable[Node], path: FilePath, **of: Any) -> dict[str, Any]:
        """Continue from what any executor saved; all ranks call this alike."""
        path = self.newest(path)
        extra, checkpoint = super().load(state, variables, path, **of), opened(path)
        taken = self.taken(checkpoint, variables, **of)
        for bundle in self.bundles:
            count = self.servable.step_count(bundle.variables[0])
            self._kept(bundle).read(checkpoint, taken, 0 if count is None else int(state.arrays[count.name]))
        self.comm.rows.forget()
        self._fetch(state)
        return extra

    def taken(self, saved: Checkpoint, variables: Iterable[Node], **of: Any) -> dict[str, Wanted]:
        """What is taken of a checkpoint, if servers can do so."""
        found = super().taken(saved, variables, **of)
        for bundle in self.bundles:
            self._kept(bundle).check(found)
        return found

    def _kept(self, bundle: Bundle) -> KeptBundle:
        """How files hold it."""
        each = {v: [v, *self.servable.slots([v])] for v in bundle.variables}
        return KeptBundle(self.comm.client, self._named(bundle), bundle, each)
