"""A worker's side of the parameter server: push, pull, clock, over one DEALER socket per server.

Every request returns a `PendingReply` at once; its `wait()` gives the answer, so that communication overlaps with the
work in between. Large requests are cut into chunks, sparse ones carry every row once. An executor or a cache decides
when to push what. One thread uses a client; only signs of life come from another (`Heartbeat`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np

from ...answers import seconds
from ...core.errors import ArgumentError
from ...core.state import FilePath
from ..store.consistency import Consistency
from ..store.member import new_life
from ..store.messages import Kind, RefusedError, given, row_bytes, wire_array
from ..store.partial_reduce import Group
from ..store.partition import Block, Parameter, partition, sum_by_id
from .filling import checked, give_first
from .handshake import Handshake, Heartbeat, Introduction, dealer, sign_of_life
from .pending import PendingReply, settle
from .tables import ClientTables, Coding
from .transport import Request, ServerLink, Transport

PUSHES = (Kind.PUSH, Kind.PUSH_PULL)
WRITES = (*PUSHES, Kind.RATE, Kind.MAP)


class Client(ClientTables):
    """A worker's connection to all servers of a job.

    `worker` is its rank. It gives up on a server that is silent for `silence` seconds ($HETU_SILENCE or 60), and a
    `wait()` after `timeout` (ten times $HETU_DEADLINE or 300) on one that lives, which may itself wait for slower
    workers. An unanswered request is first sent again after `retry` seconds. Large arrays go to servers on the same
    host through `shared` memory. Arrays passed to a push must not change before its `wait()`, or before the next
    `clock()`; an `out` is filled as the answers arrive.

    >>> from hetu.ps import Options, ServerProcess
    >>> with ServerProcess(Options(workers=1, token="secret")) as server:
    ...     with Client([server.address], worker=0, token="secret") as client:
    ...         client.create({"w": Parameter((2,), options={"learning_rate": 0.5})}, {"w": np.ones(2)})
    ...         _ = client.push("w", np.array([2.0, 4.0]))
    ...         client.clock().wait()
    ...         client.pull("w").wait().tolist()
    [0.0, -1.0]
    """

    def __init__(
        self,
        addresses: Sequence[str],
        worker: int,
        token: str,
        *,
        timeout: float | None = None,
        silence: float | None = None,
        retry: float = 1.0,
        key_file: FilePath = "",
        shared: bool = True,
    ) -> None:
        import zmq

        super().__init__()
        self.keys = self.rounds = 0  # of blocks, and of reductions, that there have been
        self.writes: deque[Request] = deque()  # of this clock, without those before the oldest unanswered one
        self.ticks: list[Request] = []  # the end of the last clock
        self.codings: dict[str, Coding] = {}  # of parameters that travel in fewer bytes
        self.laws: dict[str, Any] = {}  # of the first values of tables that grow
        self.cached = weakref.WeakValueDictionary[str, Any]()  # tables of which rows are kept here, see `rows.py`
        self.asked: dict[str, list[Any]] = {}  # rows that are on their way before they are wanted, of all executors
        self.fed: int | None = None  # a number of what this step is fed, which servers compare as it ends
        self.context = zmq.Context()
        said = token, worker, new_life()
        with ExitStack() as failed:
            failed.callback(self.context.destroy, linger=0)
            waits = {"silence": seconds("HETU_SILENCE", 60.0) if silence is None else silence, "retry": retry}
            waits["timeout"] = 10 * seconds("HETU_DEADLINE", 300.0) if timeout is None else timeout
            sockets = [dealer(zmq, self.context, address, token, key_file, watched=True) for address in addresses]
            links = [ServerLink(a, s, Introduction(a, *said), Handshake(zmq, s, a)) for a, s in zip(addresses, sockets)]
            sockets = [dealer(zmq, self.context, address, token, key_file) for address in addresses]
            self.heartbeat = Heartbeat(zmq, sockets, sign_of_life(*said))
            weakref.finalize(self, self.heartbeat.stop)  # nobody waits for a worker that lost its client
            failed.callback(self.heartbeat.stop)
            self.transport = Transport(zmq, links, said[1], said[2], shared=shared, **waits)
            failed.pop_all()
        self.heartbeat.keep(min(link.lease for link in links))
        self.step = self.began = max(link.clock for link in links)  # 0 in the first life of a worker
        for clock in range(max(0, min(link.clock for link in links) - 1), self.step):  # each end gives leave to go on
            self.transport.wait(self.ticks)  # an earlier life may have ended between the clocks of two servers
            behind = (server for server, link in enumerate(links) if link.clock <= clock + 1)
            self.ticks = [self.transport.submit(server, Kind.CLOCK, step=clock) for server in behind]

    @property
    def worker(self) -> int:
        """The number of this worker in the job, from 0."""
        return self.transport.worker

    def close(self) -> None:
        """Drop the connections. Servers wait for this worker until its lease ends; `leave` first if it is done."""
        self.heartbeat.stop()
        self.transport.close()
        self.context.destroy(linger=0)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- tables ----------------------------------------------------------------------------------------------

    def create(self, parameters: Mapping[str, Parameter], values: Mapping[str, Any]) -> None:
        """Make tables with first values: arrays, `FirstValues`, or of a table that grows an initializer.

        Every worker calls this alike, and the first values win: of several workers the servers ask one for them, and
        the others wait until these are there.
        """
        known = [name for name in parameters if name in self.parameters]
        if known:
            raise ArgumentError(f"{', '.join(known)} exist already", fix="create every parameter once")
        first = {name: checked(name, parameter, values[name]) for name, parameter in parameters.items()}
        self.blocks |= (blocks := partition(parameters, len(self.transport.links), self.keys, self.blocks))
        self.parameters |= parameters
        try:
            give_first(self, first)
        except BaseException as error:
            freed = self.free(parameters)  # so that they can be created rightly, under the same keys
            with suppress(RefusedError):
                if isinstance(error, RefusedError):
                    freed.wait()
            raise
        self.keys += sum(map(len, blocks.values()))

    def free(self, names: Iterable[str]) -> PendingReply:
        """Forget parameters, which the servers drop once no worker needs them; every worker calls this alike."""
        gone = [block for name in [*names] if self.parameters.pop(name, None) for block in self.blocks.pop(name)]
        self.codings = {name: coding for name, coding in self.codings.items() if name in self.parameters}
        return self._handle([self.transport.submit(b.server, Kind.FREE, key=b.key, step=self.step) for b in gone])

    def agree(self, mode: Consistency) -> None:
        """Run the job under this consistency; every worker calls this alike, before any table is made."""
        self.transport.wait(self._everywhere(Kind.MODE, meta={"consistency": str(mode)}))

    # -- whole parameters ------------------------------------------------------------------------------------

    def push(self, name: str, gradient: np.ndarray) -> PendingReply:
        """Send the gradient of a whole parameter."""
        return self._handle(self.request(Kind.PUSH, name, values=self._flat(name, gradient)))

    def pull(self, name: str, out: np.ndarray | None = None) -> PendingReply:
        """A whole parameter, into the C-contiguous `out` if given."""
        if (parameter := self.parameter(name, whole=True)).placed is not None:
            return self.pull_rows(name, np.arange(parameter.shape[0]), out)
        made = self._buffer(name, parameter.shape, out)
        return self._handle(self.request(Kind.PULL, name, out=made.reshape(parameter.matrix)), lambda _: made)

    def push_pull(self, name: str, gradient: np.ndarray, out: np.ndarray | None = None) -> PendingReply:
        """Both in one round trip. Under BSP the answer does not hold this clock's pushes: use push, clock, pull."""
        flat, made = self._flat(name, gradient), self._buffer(name, self.parameters[name].shape, out)
        return self._handle(self.request(Kind.PUSH_PULL, name, values=flat, out=made.reshape(1, -1)), lambda _: made)

    def set_rate(self, name: str, rate: float) -> PendingReply:
        """Set a parameter's learning rate from this clock on. All workers send the same one, or only one does."""
        return self.ask(Kind.RATE, name, lambda _: {"rate": float(rate)})

    # -- rows ------------------------------------------------------------------------------------------------

    def push_rows(self, name: str, ids: np.ndarray, rows: np.ndarray, counts: np.ndarray | None = None) -> PendingReply:
        """Send gradients of the rows `ids`, ids.shape + row shape. Rows of equal ids are summed before they travel.

        `counts`, only for ids that are distinct and increasing, says how many updates each row stands for.
        """
        places, sums = self._unique_rows(name, ids, rows)
        counts = None if counts is None else counts[np.argsort(self.places(name, ids))]
        return self._handle(self.request(Kind.PUSH, name, places, values=sums, counts=counts))

    def push_parts(self, name: str, ids: np.ndarray, parts: Sequence[np.ndarray]) -> PendingReply:
        """As `push_rows`, of flat ids and rows that lie in several arrays, one after the other."""
        parameter = self.parameter(name)
        rows = [part.astype(parameter.element, copy=False) for part in parts]
        places, sums = sum_by_id(self.places(name, ids), rows, parameter.shape[1:])
        return self._handle(self.request(Kind.PUSH, name, places, values=sums.reshape(len(places), parameter.cols)))

    def pull_rows(self, name: str, ids: np.ndarray, out: np.ndarray | None = None) -> PendingReply:
        """The rows `ids`, as ids.shape + row shape. Every distinct row travels once."""
        shape, asked = np.shape(ids), self.pull_distinct(name, ids)
        return PendingReply(self.transport, asked.requests, lambda _: self._spread(name, shape, asked.wait(), out))

    def pull_distinct(self, name: str, ids: np.ndarray) -> PendingReply:
        """The distinct rows of `ids`, (rows, cols), and which of them each id means."""
        unique, inverse = np.unique(self.places(name, ids), return_inverse=True)
        found = self._rows(name, len(unique))
        return self._handle(self.request(Kind.PULL, name, unique, out=found), lambda _: (found, inverse.reshape(-1)))

    def push_pull_rows(self, name: str, ids: np.ndarray, rows: np.ndarray) -> PendingReply:
        """Push gradients of rows and get these rows back in one round trip; for BSP see `push_pull`."""
        places = self.places(name, ids)
        unique, sums = self._unique_rows(name, ids, rows)
        inverse = np.searchsorted(unique, places)
        found = self._rows(name, len(unique))
        requests = self.request(Kind.PUSH_PULL, name, unique, values=sums, out=found)
        return self._handle(requests, lambda _: self._spread(name, places.shape, (found, inverse), None))

    def sync_rows(self, name: str, ids: np.ndarray, limits: np.ndarray) -> PendingReply:
        """The rows of the distinct `ids` whose version is above their limit: (ids, versions, rows), in any order."""
        places = self.places(name, ids)
        order = np.argsort(places)
        requests = self.request(Kind.SYNC, name, places[order], counts=limits[order])
        none = np.empty(0, "<i8"), np.empty(0, "<i8"), self._rows(name, 0)
        return self._handle(requests, lambda found: self._gathered(name, found, none))

    def call(self, name: str, function: str, **arguments: Any) -> PendingReply:
        """A server function on every block of a parameter: the (ids, rows) of all servers, one after the other."""
        meta = {"function": function, "arguments": arguments}
        return self.ask(Kind.CALL, name, lambda _: meta, partial(self._gathered, name))

    def reduce(self, function: str, parts: Mapping[int, np.ndarray], **arguments: Any) -> PendingReply:
        """What the `reduction` of a name makes, on each of some servers, of the parts (rows, cols) that all workers
        give it; all call this alike. The answers are in the order of `parts`, a dict by servers."""
        self.rounds += 1
        meta = {"function": function, "arguments": arguments}
        fields: dict[str, Any] = {"key": self.rounds & 0xFFFFFFFF, "step": self.step, "meta": meta}
        submit = self.transport.submit
        asked = [submit(k, Kind.REDUCE, values=wire_array(part), **fields) for k, part in parts.items()]
        return self._handle(asked, lambda requests: [given(given(each.reply).values) for each in requests])

    # -- time and membership ---------------------------------------------------------------------------------

    def clock(self, *, snapshot: bool = False) -> PendingReply:
        """End this step: wait until its pushes have arrived, then tell all servers.

        `wait()` on the result returns when the job's consistency allows this worker to begin the next step. Without it,
        reads of the next step may be sent ahead, and the first push waits. With `snapshot`, which a single worker may
        ask for, the servers keep the moment when all workers have ended this step (`snapshot.py`), and `wait()` returns
        when all have it on disk; RefusedError if one cannot, or was killed before.
        """
        self.wait_for_leave()
        settle(self.transport, self.writes)
        wanted = snapshot or any(link.due for link in self.transport.links)
        meta = ({"snapshot": True} if wanted else {}) | ({} if self.fed is None else {"fed": self.fed})
        self.ticks, self.fed = self._everywhere(Kind.CLOCK, step=self.step, meta=meta or None), None
        self.step += 1
        written = self._everywhere(Kind.SNAPSHOT, step=self.step) if snapshot else []
        return PendingReply(self.transport, [*self.ticks, *written])

    def ready(self, iteration: int, model: int = 0, **settings: float) -> PendingReply:
        """Ask for partners of a partial reduce of a model, by the settings of `Controller`; the answer is a `Group`."""
        request = self.transport.submit(0, Kind.READY, step=iteration, key=model, meta=settings or None)
        return self._handle([request], lambda requests: Group.of(given(requests[0].reply)))

    def away(self) -> PendingReply:
        """Let nobody wait for this worker in partial reduces until it is ready again."""
        return self._handle([self.transport.submit(0, Kind.READY, meta={"away": True})])

    def ping(self) -> None:
        """Wait for a sign of life from every server."""
        self.transport.wait(self._everywhere(Kind.PING))

    def status(self) -> list[dict[str, Any]]:
        """The state of each server, as `ParameterStore.status`."""
        return [reply.facts for reply in self.transport.wait(self._everywhere(Kind.STATUS))]

    def traffic(self) -> list[tuple[int, int]]:
        """The bytes that went to each server and came from it, through its socket."""
        return [(link.sent, link.received) for link in self.transport.links]

    def leave(self) -> None:
        """Leave the job, so that no worker waits for this one. Pushes of an unfinished clock are dropped."""
        if self.context.closed:
            return
        try:
            self.transport.wait(self._everywhere(Kind.LEAVE))
        except RefusedError as error:
            if error.code != "evicted":  # the answer to the first request got lost
                raise
        for tick in self.ticks:  # nobody may have waited for the end of the last clock
            if tick.error is not None and not tick.told:
                raise tick.error

    # -- requests --------------------------------------------------------------------------------------------

    def _handle(self, requests: list[Request], finish: Callable[[list[Request]], Any] | None = None) -> PendingReply:
        if requests and requests[0].message.kind in WRITES:
            while self.writes and self.writes[0].reply is not None:
                self.writes.popleft()
            self.writes += requests
        return PendingReply(self.transport, requests, finish)

    def _everywhere(self, kind: Kind, **fields: Any) -> list[Request]:
        return [self.transport.submit(server, kind, **fields) for server in range(len(self.transport.links))]

    def ask(
        self,
        kind: Kind,
        name: str,
        meta: Callable[[Block], dict[str, Any]],
        finish: Callable[[list[Request]], Any] | None = None,
    ) -> PendingReply:
        """A request to the servers of all blocks of a parameter, which says `meta(block)` of each."""
        self.parameter(name)
        if kind in WRITES:
            self.wait_for_leave()
        submit, step, blocks = self.transport.submit, self.step, self.blocks[name]
        asked = [submit(b.server, kind, key=b.key, start=b.start, step=step, meta=meta(b)) for b in blocks]
        return self._handle(asked, finish)

    def wait_for_leave(self) -> None:
        """Wait until this clock may begin: servers refuse earlier writes of it."""
        if self.ticks:
            settle(self.transport, self.ticks)

    def request(
        self,
        kind: Kind,
        name: str,
        places: np.ndarray | slice | None = None,
        *,
        blocks: Sequence[Block] | None = None,
        values: np.ndarray | None = None,
        counts: np.ndarray | None = None,
        out: np.ndarray | None = None,
        meta: dict[str, Any] | None = None,
        arrays: int = 1,
        always: bool = False,
    ) -> list[Request]:
        """Requests, in chunks, for a whole parameter, a slice of a table's rows, or those at distinct rising `places`.

        `values` and `out` are as `Parameter.matrix`, or one row for each of these. `arrays` arrays travel side by side.
        Where no rows go there is no request, unless there `always` is.
        """
        if writes := kind in WRITES:
            self.wait_for_leave()
        parameter, requests = self.parameters[name], list[Request]()
        nbytes = row_bytes(cols := arrays * parameter.cols, parameter.element)
        coding = self.codings.setdefault(name, Coding(parameter)) if parameter.coded else None
        for block in self.blocks[name] if blocks is None else blocks:
            told = always or (writes and parameter.timed)
            for number, (part, rows) in enumerate(block.chunks(parameter, places, nbytes, told)):
                size = 1 if rows is None else len(rows)
                sent = None if values is None else wire_array(values[part].reshape(size, -1 if size else cols))
                if coding is not None and sent is not None and kind in PUSHES:
                    sent = coding.pushed(block.key, sent)
                fields: dict[str, Any] = {"start": block.start, "key": block.key, "step": self.step, "ids": rows}
                fields["values"], fields["out"] = sent, None if out is None else out[part]
                fields["counts"] = None if counts is None else wire_array(counts[part], np.dtype("<i8"))
                fields["decode"] = None if coding is None else coding.pulled(kind, block)
                fields["meta"] = {"more": True} if number and writes and parameter.timed else meta
                requests.append(self.transport.submit(block.server, kind, part=part, **fields))
        return requests

    def _gathered(
        self, name: str, requests: list[Request], none: tuple[np.ndarray, ...] = ()
    ) -> tuple[np.ndarray, ...]:
        """The replies of all requests one after the other, with ids of the whole table."""
        replies = [(request.start, given(request.reply)) for request in requests]
        found = [(given(reply.ids) + start, reply.counts, reply.values) for start, reply in replies]
        if not found:
            return none
        places, *others = (np.concatenate(part) for part in zip(*found) if part[0] is not None)
        parameter = self.parameters[name]
        return parameter.ids(places, len(self.blocks[name])) if parameter.sparse else places, *others
