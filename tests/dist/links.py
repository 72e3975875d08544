"""A communicator that counts the bytes that ranks send to each other, as the algorithms of rings and messages do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hetu.dist.comm.call import CollectiveCall, PeerMessage
from hetu.dist.comm.comm import Comm, Handle


def around(group: Sequence[int], nbytes: int) -> Counter[tuple[int, int]]:
    """So many bytes from each rank of a ring to the next."""
    return Counter({(a, b): nbytes for a, b in zip(group, (*group[1:], group[0])) if a != b})


class CountingComm(Comm):
    """`inner`, and in `sent` the bytes that this rank has sent, by (source, target)."""

    def __init__(self, inner: Comm, sent: Counter[tuple[int, int]] | None = None) -> None:
        super().__init__(inner.rank, inner.ranks, inner.deadline, inner.recorder)
        self.inner, self.sent = inner, Counter() if sent is None else sent

    def _noted(self, call: CollectiveCall, what: str = "") -> CollectiveCall:
        return self.inner._noted(call, what)

    def _start(self, call: CollectiveCall) -> Handle:
        mine, peers = self.ranks[self.rank], self.world_size - 1
        each = {  # of the blocks into which the ring cuts what is reduced, or that it carries around
            "all_reduce": 2 * peers * call.x.nbytes // self.world_size,
            "reduce_scatter": peers * call.out.nbytes,
            "all_gather": peers * call.x.nbytes,
        }.get(call.kind, 0)
        self.sent[mine, self.ranks[(self.rank + 1) % self.world_size]] += each
        return self.inner._start(call)

    def note_messages(self, sends, recvs, line):
        return []  # `inner` notes them

    def _exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], noted) -> None:
        for to, x in sends:
            self.sent[self.ranks[self.rank], self.ranks[to]] += x.nbytes
        self.inner.exchange(sends, recvs)

    def _split(self, group: tuple[int, ...]) -> Comm:
        return CountingComm(self.inner.split(group), self.sent)
