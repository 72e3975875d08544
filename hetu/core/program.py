"""The program of one sub-graph at one set of shapes: a flat list of bound calls over one arena.

Order, addresses and the exact callables are decided before the first step. Running is `for call in calls: call()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .backend import Device, Scratch, aligned_empty, filler, fixed_array, host_empty, to_numpy
from .errors import ArgumentError, HetuError
from .graph import Node
from .kernels import Call, Calls, kernels_of
from .memory import SCRATCH, MemoryPlan, plan, types_of
from .op import LEAVES, Role
from .state import State


class Arena:
    """One growing block of memory that all programs of an executor share: only one of them runs at a time.

    A second block, in the memory of the host, has what they put away there.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.block: Any = aligned_empty(device.xp, 0)
        self.host = host_empty(device.xp, 0)

    def reserve(self, nbytes: int) -> Any:
        """The first `nbytes` of the block. Growing leaves older programs on their old block, which stays alive."""
        if nbytes > self.block.nbytes:
            self.block = aligned_empty(self.device.xp, nbytes)
        return self.block[:nbytes]

    def reserve_host(self, nbytes: int) -> np.ndarray:
        """The first `nbytes` of the block in the memory of the host."""
        if nbytes > self.host.nbytes:
            self.host = host_empty(self.device.xp, nbytes)
        return self.host[:nbytes]


@dataclass(frozen=True)
class Step:
    """One node of the program with the calls that compute it."""

    node: Node
    out: Any
    calls: tuple[Call, ...]


class Program:
    """Bound instructions. `print(program)` shows each, cut to a line, with its place in memory, what it frees, and the
    peak.

    In a notebook a program is shown as the picture of its memory plan.
    """

    def __init__(
        self,
        fetches: Sequence[Node],
        updates: Mapping[Node, Node],
        state: State,
        arena: Arena,
        *,
        donate: bool = True,
        reuse: bool = True,
        checks: bool = True,
        comm: Any = None,
    ) -> None:
        self.fetches, self.updates, self.state = tuple(fetches), dict(updates), state
        self.checks = checks and state.device.kind == "cpu"
        self.xp, self.comm = state.device.xp, comm
        self.plan: MemoryPlan = plan(self.fetches, self.updates, donate=donate, reuse=reuse, scratch=self.xp is np)
        self.block, self.host = arena.reserve(self.plan.arena_bytes), arena.reserve_host(self.plan.host_bytes)
        self.arrays: dict[Node, Any] = {}
        self.feeds: dict[str, Any] = {}
        self.fills: dict[str, Callable[[np.ndarray], None]] = {}  # copies a fed array into its buffer
        self.parts: dict[str, tuple[str, tuple[slice, ...]]] = {}  # the fed array, and its part, for a buffer
        self.calls = next(calls for calls in iter(self._bound, ...) if calls is not None)
        self.takes = kernels_of(self.xp).takers(self)  # feed an array that is like the buffer
        self.commits = self._commits()
        self.results = [partial(to_numpy, self.arrays[f]) for f in self.fetches]
        donated = {node for node, _ in self.plan.donated}  # before the first of these steps a failure changes nothing
        self.first_write = next((i for i, s in enumerate(self.steps) if s.node in donated), len(self.steps))
        self.captured = self._captured()

    def _bound(self) -> Calls | None:
        """Bind all nodes; None where the room promised what it then could not make, and knows better now."""
        self.steps = [step for node in self.plan.nodes if (step := self._bind(node)) is not None]
        return kernels_of(self.xp).joined(self._flat_calls())

    def _bind(self, node: Node) -> Step | None:
        """Give `node` its arrays; a Step when there is something to compute."""
        if node.role in LEAVES:
            self.arrays[node] = self._leaf(node)
            return None
        inputs = [self.arrays[i] for i in node.inputs]
        if node in self.plan.views:
            view = node.op.view_rule
            self.arrays[node] = inputs[0][node.attrs["index"]] if view is None else view(self.xp, *inputs, **node.attrs)
            return None
        outs = tuple(self._place(node, slot) for slot in range(len(types_of(node))))
        out = outs if isinstance(node.type, tuple) else outs[0]
        self.arrays[node] = out
        calls = self._bound_to_comm(node, out, inputs) if node.role is Role.COMMUNICATION else None
        if calls is None:
            calls = node.op.bound(self.xp, out, inputs, node.attrs, self._scratch(node))
        if self.checks and node.op.check_rule:
            check = partial(node.op.check_rule, self.xp, *inputs, **node.attrs)
            calls = [*kernels_of(self.xp).checked(node.op, check, inputs, node.attrs), *calls]
        return Step(node, out, tuple(calls))

    def _bound_to_comm(self, node: Node, out: Any, inputs: Sequence[Any]) -> list[Call]:
        """Calls that communicate, between calls that name the user's line for the report of a deadlock."""
        if self.comm is None:
            fix = "pass comm=ht.dist.world()"
            raise ArgumentError(f"{node!r} communicates, but the executor has no communicator", fix=fix, site=node.site)
        line = self.comm.line_of(node)
        self.comm.at(line)
        calls = node.op.bound(self.xp, out, inputs, {**node.attrs, "comm": self.comm}, self._scratch(node))
        self.comm.at(None)
        return [partial(self.comm.at, line), *calls, partial(self.comm.at, None)]

    def _leaf(self, node: Node) -> Any:
        if node.role is Role.VARIABLE:
            return self.state.arrays[node.name]
        if node.role is Role.CONSTANT:
            return fixed_array(self.xp, node.attrs["value"])
        buffer = aligned_empty(self.xp, int(node.tensor.nbytes)).view(node.dtype).reshape(node.shape)
        self.feeds[node.name], self.fills[node.name] = buffer, filler(self.xp, buffer)
        return buffer

    def _place(self, node: Node, slot: int) -> Any:
        type_, storage = types_of(node)[slot], self.plan.storage(node, slot)
        if storage.home is not None:
            return self.state.arrays[storage.home.name].reshape(type_.shape)
        nbytes = int(type_.nbytes)
        block = self.host if storage.on_host else self.block
        return block[storage.offset : storage.offset + nbytes].view(type_.dtype).reshape(type_.shape)

    def _scratch(self, node: Node) -> Scratch | None:
        """None on a GPU alone, and not where nothing is packed: ranks of which only some pack must bind alike."""
        found = self.plan.storages.get((node, SCRATCH))
        begin, nbytes = (found.offset, found.nbytes) if found else (0, 0)
        return Scratch(self.block[begin : begin + nbytes]) if self.xp is np else None

    def _commits(self) -> list[tuple[Any, Any, bool]]:
        """(variable array, new value, whether to copy the value aside first because its source is overwritten too)."""
        late = [(variable, value, self.plan.roots[value, 0][0]) for variable, value in self.plan.late.items()]
        return [(self.state.arrays[v.name], self.arrays[new], root in self.updates) for v, new, root in late]

    def _flat_calls(self) -> list[Call]:
        """All calls in order; while a communication is under way, a nudge after each step keeps it moving."""
        lazy = [i for i, s in enumerate(self.steps) if s.node.op.lazy]
        nudged = range(0, lazy[-1]) if lazy else range(0)
        return [
            c for i, s in enumerate(self.steps) for c in (*s.calls, *((self.comm.progress,) if i in nudged else ()))
        ]

    def run(self) -> list[np.ndarray]:
        """One step on what lies in the feed buffers; the caller owns the returned arrays."""
        call = None
        try:
            if self.captured is not None:
                self.captured.run()
            else:
                for call in self.calls:
                    call()
        except BaseException as error:
            call = call if self.captured is None else self.captured.call
            raise self._explained(error, getattr(call, "call", call)) from error.__cause__
        results = [copy() for copy in self.results]
        if self.captured is not None and self.comm is not None:
            self.state.dirty = True
            self.comm.progress()  # a GPU says by now what went wrong on the way
            self.state.dirty = False
        if self.commits:
            self.commit()
        return results

    def _captured(self) -> Any:
        meets = next((s.node for s in self.steps if s.node.role is Role.COMMUNICATION), None)
        obstacle = "" if meets is None else f"{meets!r} meets other ranks"
        return kernels_of(self.xp).captured(self.xp, self.calls, self._say, obstacle)

    def _say(self, call: Call | None, reason: str) -> None:
        node = next((s.node for s in self.steps if any(c is call for c in s.calls)), None)
        print(f"hetu: a program runs call by call, not as one CUDA graph: {node!r}: {reason}", file=sys.stderr)

    def _explained(self, error: BaseException, call: Call | None) -> BaseException:
        """The error with the node and the user's line that raised it; notes whether variables have changed already."""
        index = next((i for i, s in enumerate(self.steps) if any(c is call for c in s.calls)), 0)
        self.state.dirty = self.state.dirty or index >= self.first_write
        node = self.steps[index].node
        if isinstance(error, HetuError):
            return error.raised_by(node.op.name, node.site)
        error.add_note(f"while computing {node!r}\n{node.site.excerpt() if node.site else ''}".rstrip())
        return error

    def commit(self) -> None:
        """Copy the new values that could not be written in place; sources that are overwritten are read first."""
        copies = [(target, value.copy() if aside else value) for target, value, aside in self.commits]
        for target, value in copies:
            self.xp.copyto(target, value)

    def __repr__(self) -> str:
        return f"<Program of {len(self.steps)} instructions, {self.plan.arena_bytes:,} bytes>"
