"""Partial reduce: a controller that groups workers as they become ready, so that a straggler delays only itself.

An all-reduce waits for the slowest worker of all. Here the first `group` ready workers average among themselves and go
on; a smaller group goes when its first worker has waited for `wait` seconds. Two rules keep the models of all workers
together: recent groups must connect all workers, otherwise the next group bridges the parts; and a member that is
behind weighs less in the average. X. Miao et al., "Heterogeneity-Aware Distributed Machine Learning Training via
Partial Reduce", SIGMOD 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Annotated, Any

import numpy as np

from ...core.errors import ArgumentError
from ...ranges import AtLeast1, Endless, Fraction, Range
from .messages import Message, RefusedError, given

MOST_MODELS = 1000  # of one job


GroupSize = Annotated[int, Range(2)]


@dataclass(frozen=True)
class Group:
    """The workers that average together. `number` is unique and rises: use it as the tag of their communication.

    Every member multiplies its values by its weight, adds up, and takes over the iteration of the foremost.
    """

    number: int
    members: tuple[int, ...]
    weights: tuple[float, ...]
    iteration: int

    @classmethod
    def of(cls, answer: Message) -> Group:
        """The group in a server's answer."""
        weights = given(answer.values)[:, 0].tolist()
        return cls(int(given(answer.counts)[0]), tuple(given(answer.ids).tolist()), tuple(weights), answer.step)

    def answer(self, request: Message) -> Message:
        """To a member: the members as `ids`, their weights as `values` (members, 1), the group's number for each as
        `counts`, and the iteration to take over as `step`."""
        ids, weights = np.array(self.members, "<i8"), np.array(self.weights, "<f8").reshape(-1, 1)
        counts = np.full(len(ids), self.number, "<i8")
        return request.reply(step=self.iteration, ids=ids, counts=counts, values=weights)


class Controller:
    """Groups the workers that are ready.

    `group` is the usual size of a group, `wait` the seconds after which a smaller one (of at least two) may go, and
    `decay` the factor on a member's weight for each iteration that it is behind the foremost.

    >>> controller = Controller(4, group=2)
    >>> controller.add(3, iteration=5, now=0.0), controller.add(1, iteration=6, now=0.1).members
    (None, (1, 3))
    """

    def __init__(
        self, workers: AtLeast1, group: GroupSize = 2, *, wait: Endless = math.inf, decay: Fraction = 0.5
    ) -> None:
        if not 1 < group <= max(workers, 2):
            raise ArgumentError(f"groups of {group} among {workers} workers", fix="use 2 <= group <= workers")
        self.workers, self.group, self.wait, self.decay = set(range(workers)), group, wait, decay
        self.waiting: dict[int, tuple[int, float]] = {}  # worker -> (iteration, ready since), in order of arrival
        self.where: dict[int, Controller] = {}  # worker -> that of the model in which it waits
        self.span = math.ceil((workers - 1) / (group - 1))  # this many groups can connect everybody
        self.recent: list[tuple[int, ...]] = []
        self.formed = 0
        self.requests: dict[int, Message] = {}
        self.told: dict[int, tuple[int, Group]] = {}  # worker -> its last request, and the group that answers it

    # -- grouping --------------------------------------------------------------------------------------------

    def add(self, worker: int, iteration: int, now: float) -> Group | None:
        """`worker` is ready; returns the group that it completes, if any."""
        self.waiting.setdefault(worker, (iteration, now))
        self.where[worker] = self
        return self._complete()

    @property
    def coming(self) -> set[int]:
        """The workers that are ready or may become it: who waits for partners of another model may wait for these."""
        return self.workers - {worker for worker, other in self.where.items() if other is not self}

    def _complete(self) -> Group | None:
        """The next group, if enough workers are ready and all workers stay connected."""
        coming = self.coming
        if not self.waiting or len(self.waiting) < min(self.group, len(coming)):
            return None
        chosen = list(self.waiting)[: self.group]
        if not self._keeps_connected(chosen):
            chosen = self._bridge()
            if not self._keeps_connected(chosen) and len(self.waiting) < len(coming):
                return None  # wait for a worker of the missing part, or for the deadline
        return self._decide(chosen)

    def overdue(self, now: float) -> Group | None:
        """The group, possibly smaller, whose first member has waited long enough."""
        if len(self.waiting) < min(2, len(self.coming)) or not self.waiting:
            return None
        return self._decide(self._bridge()) if now - next(iter(self.waiting.values()))[1] >= self.wait else None

    def join(self, worker: int) -> None:
        """`worker` takes part, possibly again."""
        self.workers.add(worker)

    def forget(self, worker: int) -> None:
        """`worker` no longer waits."""
        for table in (self.waiting, self.requests, self.told):
            table.pop(worker, None)
        if self.where.get(worker) is self:
            del self.where[worker]

    def remove(self, worker: int) -> Group | None:
        """`worker` is gone; returns the group of those that waited for it, if they are enough."""
        self.forget(worker)
        self.workers.discard(worker)
        return self._complete()

    def _decide(self, chosen: list[int]) -> Group:
        members = sorted(chosen)
        iterations = [self.waiting.pop(w)[0] for w in members]
        for worker in members:
            self.where.pop(worker, None)
        foremost = max(iterations)
        raw = [self.decay ** (foremost - i) for i in iterations]
        self.formed += 1
        self.recent = [*self.recent, tuple(members)][-self.span - 1 :]
        return Group(self.formed, tuple(members), tuple(r / sum(raw) for r in raw), foremost)

    # -- the graph of recent groups --------------------------------------------------------------------------

    def _windows(self) -> list[tuple[int, list[set[int]]]]:
        """(groups to come, connected parts so far) of every unfinished window of span + 2 groups."""
        whole = self.span + 2
        lengths = range(1, min(len(self.recent), whole - 1) + 1)
        return [(whole - n - 1, connected(self.workers, self.recent[-n:])) for n in reversed(lengths)]

    def _keeps_connected(self, chosen: list[int]) -> bool:
        """Whether every window can still connect all workers, or comes closer to it."""
        for left, parts in self._windows():
            needed = self._needed(len(parts))
            if self._needed(len(join(parts, chosen))) > max(left, needed - 1):
                return False
        return True

    def _needed(self, parts: int) -> int:
        return math.ceil((parts - 1) / (self.group - 1))

    def _bridge(self) -> list[int]:
        """Members from as many different parts as possible, the longest window first; then in order of arrival."""
        windows = [{w: min(part) for part in parts for w in part} for _, parts in self._windows()]
        chosen = [next(iter(self.waiting))]
        while len(chosen) < min(self.group, len(self.waiting)):
            rest = [w for w in self.waiting if w not in chosen]
            met = [(part_of, {part_of.get(c, c) for c in chosen}) for part_of in windows]
            new = [sum(part_of.get(w, w) not in parts for part_of, parts in met) for w in rest]
            chosen.append(rest[new.index(max(new))])
        return chosen

    # -- messages --------------------------------------------------------------------------------------------

    def ready(self, message: Message, now: float) -> list[Message]:
        """Handle READY of a worker at iteration `message.step`; answers all members once their group is formed. A
        repeated request gets the same answer again."""
        worker = message.worker
        if (told := self.repeated(message)) or worker in self.requests:
            return told
        self.requests[worker] = message
        return self._replies(self.add(worker, message.step, now))

    def repeated(self, message: Message) -> list[Message]:
        """The answer to a request that has been answered, if it is the worker's last."""
        seq, group = self.told.get(message.worker, (-1, None))
        return [group.answer(message)] if group is not None and seq == message.seq else []

    def gone(self, worker: int) -> list[Message]:
        """Answers to the workers that no longer wait for this one."""
        return self._replies(self.remove(worker))

    def tick(self, now: float) -> list[Message]:
        """Answers to a group whose deadline has passed."""
        return self._replies(self.overdue(now))

    def again(self) -> list[Message]:
        """Answers to a group that no longer waits for workers that have begun to wait elsewhere."""
        return self._replies(self._complete())

    def _replies(self, group: Group | None) -> list[Message]:
        if group is None:
            return []
        requests = [self.requests.pop(worker) for worker in group.members]
        self.told |= {request.worker: (request.seq, group) for request in requests}
        return [group.answer(request) for request in requests]


class Controllers:
    """A controller for each of the models that the workers of a job train: the `key` of their messages.

    `settings` are those of `Controller`, which the first READY of a model may say otherwise. One that says `away`, as
    a worker does that will not come for a while, takes it out of all models until its next. Who waits in one model is
    not waited for in another, where the last of a model would wait for those who have gone on to the next.
    """

    def __init__(self, workers: int, **settings: Any) -> None:
        self.settings, self.present, self.of = settings, set(range(workers)), dict[int, Controller]()
        self.count, self.formed_before = workers, 0  # groups of an earlier life, whose numbers are not given again
        self.where: dict[int, Controller] = {}  # who waits for which of them
        self.heard: dict[int, int] = {}  # the last READY of each worker
        self.told: dict[int, tuple[int, Group]] = {}  # and its group, of all of them together
        self.keep: Callable[[dict[str, Any]], None] | None = None  # writes down a record, before anyone is told
        self.kept: tuple[Any, ...] = ()
        Controller(workers, **settings)  # refuses what is wrong

    @property
    def formed(self) -> int:
        return max((controller.formed for controller in self.of.values()), default=self.formed_before)

    def waiting(self, now: float) -> list[dict[str, Any]]:
        """Of each model in which workers wait for partners: for how long each of them, and for any of which others."""
        return [
            {
                "waiting": {str(worker): round(now - since, 3) for worker, (_, since) in controller.waiting.items()},
                "for": sorted(controller.coming - controller.waiting.keys()),
            }
            for controller in self.of.values()
            if controller.waiting
        ]

    # -- what a later life of the server must know -------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """Who takes part, and which group was told to whom: half of one may know of it when a server is killed."""
        told = {str(worker): [seq, *astuple(group)] for worker, (seq, group) in self.told.items()}
        return {"present": sorted(self.present), "formed": self.formed, "told": told}

    def decided(self, tables: int) -> None:
        """Have it written down if anything was decided, or a table made; called before answers leave."""
        if self.keep is not None and (self.formed, self.present, tables) != self.kept:
            self.kept = self.formed, {*self.present}, tables
            self.keep(self.record())

    def recall(self, record: Mapping[str, Any]) -> None:
        """Go on from the record of the life before; who waited asks again."""
        self.present, self.formed_before = {*map(int, record["present"])}, int(record["formed"])
        for worker, (seq, number, members, weights, iteration) in record["told"].items():
            self.told[int(worker)] = int(seq), Group(int(number), (*members,), (*weights,), int(iteration))
            self.heard[int(worker)] = int(seq)

    def ready(self, message: Message, now: float) -> list[Message]:
        """Handle READY of a worker, see `Controller.ready`."""
        worker, new = message.worker, message.seq > self.heard.get(message.worker, -1)  # or repeated, and late
        if (asked := dict(message.facts)).pop("away", False):
            self.heard[worker] = max(message.seq, self.heard.get(worker, -1))
            return [message.reply(), *(self.gone(worker) if new else ())]
        controller = self.of.get(message.key) or self._made(message.key, asked)
        if wrong := [name for name, value in asked.items() if getattr(controller, name) != value]:
            text = f"{wrong[0]}={asked[wrong[0]]}, another worker has asked for {getattr(controller, wrong[0])}"
            raise RefusedError("partners", text, fix="let all workers ask alike")
        if not new:
            return controller.repeated(message)
        self.heard[worker] = message.seq
        self.join(worker)
        self.where[worker] = controller
        replies = [reply for other in self.of.values() if other is not controller for reply in other.again()]
        return replies + controller.ready(message, now)

    def _made(self, key: int, asked: Mapping[str, Any]) -> Controller:
        if len(self.of) >= MOST_MODELS:
            raise RefusedError("partners", f"{MOST_MODELS} models of one job are averaged already")
        controller = Controller(self.count, **{**self.settings, **asked})
        controller.workers, controller.formed = set(self.present), self.formed
        controller.where, controller.told = self.where, self.told
        self.of[key] = controller
        return controller

    def join(self, worker: int) -> None:
        """`worker` takes part, possibly again."""
        self.present.add(worker)
        for controller in self.of.values():
            controller.join(worker)

    def forget(self, worker: int) -> None:
        """`worker` no longer waits."""
        self.heard.pop(worker, None)
        for controller in self.of.values():
            controller.forget(worker)

    def gone(self, worker: int) -> list[Message]:
        """Answers to the workers that no longer wait for this one."""
        self.present.discard(worker)
        return [reply for controller in self.of.values() for reply in controller.gone(worker)]

    def waits(self, worker: int) -> list[Message]:
        """Answers to the workers that might wait for one that waits for them: a request of it is parked."""
        known = worker in self.where or not any(worker in controller.workers for controller in self.of.values())
        return [] if known else self.gone(worker)

    def tick(self, now: float) -> list[Message]:
        """Answers to groups whose deadlines have passed."""
        return [reply for controller in self.of.values() for reply in controller.tick(now)]


def connected(workers: set[int], groups: list[tuple[int, ...]]) -> list[set[int]]:
    """The parts into which `groups` connect `workers`.

    >>> connected({0, 1, 2, 3}, [(0, 1), (1, 2)])
    [{3}, {0, 1, 2}]
    """
    parts = [{w} for w in sorted(workers)]
    for group in groups:
        parts = join(parts, group)
    return parts


def join(parts: list[set[int]], group: Iterable[int]) -> list[set[int]]:
    """The parts after one more group."""
    members = set(group)
    touched = [part for part in parts if part & members]
    return [part for part in parts if not part & members] + ([set().union(*touched)] if touched else [])
