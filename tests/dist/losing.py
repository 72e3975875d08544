"""What ranks that `survive` must do when some are lost, as checks that each rank runs: `python losing.py NAME`, too.

A check is a function of the communicator and of how this rank dies. It needs four ranks; what it returns is compared
on those that are left. `steps` is what a training does, which ranks may leave and join.
"""

from __future__ import annotations

import ctypes  # noqa: F401 - what some end by
import os
import signal
import sys
import time

import numpy as np

from hetu.dist import RankLostError, world
from hetu.dist.comm.call import CollectiveCall


def summed(comm, size=3) -> list[int]:
    """The sum of all ranks' numbers, by the group and by what is split off from it."""
    x = np.full(size, comm.ranks[comm.rank], np.int64)
    out = np.empty_like(x)
    comm.all_reduce(x, out)
    halves = [r for r in range(comm.world_size) if r % 2 == comm.rank % 2]
    part = np.empty_like(x)
    comm.split(halves).all_reduce(x, part)
    assert part[0] == sum(comm.ranks[r] for r in halves)
    return [int(out[0]), comm.world_size]


def raises(call) -> RankLostError | None:
    try:
        call()
    except RankLostError as error:
        return error
    return None


def until_lost(call, tries=1000) -> RankLostError:
    """The error of the first call that raises it: a loss may be seen a little later."""
    for _ in range(tries):
        if error := raises(call):
            return error
        time.sleep(0.01)
    raise AssertionError("no RankLostError")


def in_an_all_reduce(comm, die):
    summed(comm)
    comm.vote(True)  # nobody sees the loss before all have come here
    if comm.rank == 1:
        die()
    error = until_lost(lambda: summed(comm))
    left = comm.shrink()
    assert error.lost in ((1,), ()) and left.ranks == (0, 2, 3) and left.rank == (0, None, 1, 2)[comm.rank]
    return summed(left)


def in_every_collective(comm, die):
    """However it is called: with large arrays, later, bound, of each kind."""
    n, rank = comm.world_size, comm.rank
    x, large = np.ones(4 * n), np.ones(1 << 20)
    bound = comm.bind(CollectiveCall("all_reduce", x, x.copy(), "max"))
    ways = [
        lambda: comm.all_reduce(large, large, "max"),
        lambda: comm.all_reduce_async(large, large, "max").wait(),
        bound,
        lambda: comm.all_gather(x, np.empty(4 * n * n)),
        lambda: comm.reduce_scatter(x, np.empty(4)),
        lambda: comm.all_to_all(x, np.empty(4 * n)),
        lambda: comm.all_to_all(x, np.empty(4 * n), ([4] * n, [4] * n)),
        lambda: comm.broadcast(large),
        comm.barrier,
        lambda: comm.all_reduce(np.ones(3, "f2"), np.ones(3, "f2")),
    ]
    for way in ways:
        way()
    comm.vote(True)
    if rank == 2:
        die()
    until_lost(comm.barrier)
    for way in ways:
        assert raises(way)
    left = comm.shrink()
    return summed(left), summed(left, 1 << 18)


def with_messages(comm, die):
    """Those with a lost rank fail, also prepared ones; those between others go on until somebody revokes the group."""
    n, rank, out = comm.world_size, comm.rank, np.empty(2)
    ring = [((rank + 1) % n, np.ones(2))], [((rank - 1) % n, out)]
    bound = comm.bind_exchange(*ring)
    bound()
    comm.exchange(*ring)
    comm.vote(True)
    if rank == 0:
        die()
    if rank == 1:
        assert raises(lambda: comm.recv(out, 0))
        comm.send(np.full(2, 7.0), 2)
        assert raises(lambda: comm.recv(out, 2))
    elif rank == 2:
        comm.recv(out, 1)
        assert out[0] == 7
        comm.revoke()
    else:
        until_lost(lambda: comm.recv(out, 2))
    return summed(comm.shrink())


def revoked_while_others_wait(comm, die):
    """Without a loss: everything under way ends, in groups split off, too, and nothing begins any more."""
    pair = comm.split((2, 3)) if comm.rank >= 2 else comm.split((0, 1))
    comm.vote(True)
    if comm.rank == 0:
        comm.revoke()
        comm.revoke()
    elif comm.rank == 1:
        assert until_lost(pair.barrier)
    elif comm.rank == 2:
        assert until_lost(lambda: comm.recv(np.empty(1), 3))
    else:
        assert until_lost(lambda: comm.split((3, 0)).barrier())
    to = (comm.rank + 1) % 4
    for call in (comm.barrier, pair.barrier, lambda: comm.send(np.ones(1), to), comm.grow):
        assert raises(call) or comm.rank == 0, call
    left = comm.shrink()
    assert left.ranks == (0, 1, 2, 3)
    return summed(left)


def a_vote_of_those_who_saw_and_those_who_did_not(comm, die):
    assert comm.vote(True)
    assert not comm.vote(comm.rank != 1)
    if comm.rank == 3:
        die()
    assert not comm.vote(True)
    assert not comm.vote(True)
    left = comm.shrink()
    assert left.vote(True)
    return summed(left)


def some_vote_while_others_let_in(comm, die):
    """Who has not seen the end of what the others have left behind them meets them all the same."""
    if comm.rank == 3:
        die()
    if comm.rank == 0:
        assert raises(comm.grow)
    else:
        assert not comm.vote(True)
    return summed(comm.shrink())


def one_after_another(comm, die):
    """Down to one, which is still a group."""
    seen = []
    for last in (3, 0, 2):
        if comm.ranks[comm.rank] == last:
            die()
        until_lost(comm.barrier)
        comm = comm.shrink()
        seen.append(summed(comm))
        comm.vote(True)
    return seen


def two_at_once(comm, die):
    """One is lost in a collective, and another as the rest meets to leave it out."""
    if comm.rank == 1:
        die()
    until_lost(comm.barrier)
    comm.revoke()
    if comm.rank == 2:
        die()
    left = comm.shrink()
    while left.world_size > 2:
        until_lost(left.barrier)
        left = left.shrink()
    return summed(left)


def steps(comm, wanted, end=None, until=0, pause=0.0):
    """Who was there at each step, and had just come. One counts only if all that are left have made it; a newcomer is
    told how many there were. Rank 1 may `end` behind 20, and there are more until so many ranks are there."""
    seen, informed = [], False
    while not informed or len(seen) < wanted or comm.world_size < until:
        good = False
        try:
            if not informed:
                made = np.array([len(seen)])
                comm.all_reduce(made, made, "max")
                seen += [()] * (int(made[0]) - len(seen))
                informed = True
            elif (grown := comm.grow()) is not comm:
                assert world() is grown
                comm, informed = grown, False
                continue
            if end is not None and comm.ranks[comm.rank] == 1 and len(seen) == 20:
                end()
            good = summed(comm) == [sum(comm.ranks), comm.world_size]
        except RankLostError:
            comm.revoke()
        if comm.vote(good):  # or one may have the sum, and another meet the loss that comes behind it
            seen.append((comm.ranks, comm.newcomers))
            time.sleep(pause)
        else:
            comm, informed = comm.shrink(), False
    return seen


CHECKS = {
    check.__name__: check
    for check in (
        in_an_all_reduce,
        in_every_collective,
        with_messages,
        revoked_while_others_wait,
        a_vote_of_those_who_saw_and_those_who_did_not,
        some_vote_while_others_let_in,
        one_after_another,
        two_at_once,
    )
}


if __name__ == "__main__":
    name, *of = sys.argv[1:]
    if name in CHECKS:
        print("left:", CHECKS[name](world(deadline=30.0), lambda: os.kill(os.getpid(), signal.SIGKILL)))
    else:
        ending, until, pause = of
        made = steps(world(), 60, lambda: exec(ending), int(until), float(pause))
        print("made", len(made) >= 60, "by", made[-1][0])
