"""All-to-all in two steps: first between the ranks of each host, then between hosts.

With G ranks per host, a rank first gives each neighbor everything for ranks with the neighbor's number on any host.
Then ranks with the same number exchange between hosts: G times fewer messages, G times as long, with the same bytes
between hosts (after S. Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5.2, and X. Nie et al., "HetuMoE", 2022,
where one rank per host carries all). Hosts with different numbers of ranks exchange directly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .comm import Comm

Hosts = tuple[tuple[int, ...], ...]  # the ranks of each host


def within_hosts(group: Sequence[int], hosts: Hosts) -> Hosts:
    """The places in `group` of its members on each host; none unless two or more hosts have equally many.

    >>> within_hosts((0, 1, 4, 5), ((0, 1, 2, 3), (4, 5, 6, 7)))
    ((0, 1), (2, 3))
    >>> within_hosts((0, 1, 4), ((0, 1, 2, 3), (4, 5, 6, 7)))
    ()
    """
    rows = [tuple(place for place, rank in enumerate(group) if rank in host) for host in hosts]
    rows = [row for row in rows if row]
    even = len({len(row) for row in rows}) == 1 and sum(map(len, rows)) == len(group)
    return tuple(rows) if even and len(rows) > 1 and len(rows[0]) > 1 else ()


def all_to_all(comm: Comm, x: np.ndarray, out: np.ndarray, sizes: Sequence[Sequence[int]], rows: Hosts) -> None:
    """As `comm.all_to_all`: rank i sends `sizes[i][j]` elements to rank j; `rows` are the ranks by host."""
    me = comm.rank
    host = next(h for h, row in enumerate(rows) if me in row)
    number = rows[host].index(me)
    peers = [row[number] for row in rows]  # the ranks with this rank's number, itself included
    near, far = comm.split(rows[host]), comm.split(peers)
    targets = [row[k] for k in range(near.world_size) for row in rows]
    local = _exchange(near, _ordered(x, sizes[me], targets), [[sizes[s][p] for p in peers] for s in rows[host]])
    # Blocks arrive sorted by sender and then by target; they go on sorted by target and then by sender.
    blocks = np.split(local, np.cumsum([sizes[s][p] for s in rows[host] for p in peers])[:-1])
    onward = [blocks[k * len(peers) + h] for h in range(len(peers)) for k in range(near.world_size)]
    arrived = _exchange(far, onward, [[sizes[s][me] for s in row] for row in rows])
    sources = [s for row in rows for s in row]
    found = dict(zip(sources, np.split(arrived, np.cumsum([sizes[s][me] for s in sources])[:-1])))
    out[...] = np.concatenate([found[s] for s in range(comm.world_size)])


def _ordered(x: np.ndarray, sizes: Sequence[int], targets: Sequence[int]) -> list[np.ndarray]:
    """The blocks of `x`, of these sizes, in the order of the targets."""
    blocks = np.split(x, np.cumsum(sizes)[:-1])
    return [blocks[target] for target in targets]


def _exchange(comm: Comm, blocks: Sequence[np.ndarray], wanted: Sequence[Sequence[int]]) -> np.ndarray:
    """An all-to-all of equally many `blocks` for each rank; what comes from each has the sizes `wanted`."""
    each = len(blocks) // comm.world_size
    sent = [sum(b.size for b in blocks[k * each : (k + 1) * each]) for k in range(comm.world_size)]
    received = [sum(row) for row in wanted]
    out = np.empty(sum(received), blocks[0].dtype, like=blocks[0])
    comm.all_to_all(np.concatenate(blocks), out, (sent, received))
    return out
