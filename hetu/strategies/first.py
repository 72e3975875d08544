"""How ranks that know only the servers compare what they are: with what the first of them has left there.

None waits for another longer than that one takes to leave something. All leave it alike, in the same order, so that it
has a number.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from ..core.errors import ArgumentError
from ..ps.store.messages import RefusedError
from ..ps.store.partition import Parameter
from ..ps.wire.client import Client

ROOM = 64 << 10  # bytes of a text, compressed: of a longer one the beginning
LEFT = "compared by ranks, "  # begins the names of the parameters in which texts lie
AGREEMENT = "agreed by ranks, clock"  # and of those by which they agree


def unlike_first(client: Client, mine: str) -> Mapping[str, str]:
    """The text of the first rank to come and that of this one, if they differ, else none."""
    packed = f"{zlib.crc32(mine.encode()):08x}".encode() + zlib.compress(mine.encode(), 9)
    left = np.frombuffer(packed[:ROOM].ljust(ROOM, b"\0"), np.float64)
    name = f"{LEFT}{sum(known.startswith(LEFT) for known in client.parameters)}"
    client.create({name: Parameter(left.shape, "float64", rule="add", reduce="sum")}, {name: left})
    found = client.pull(name).wait().tobytes()
    if found == left.tobytes() or any(server["restored"] for server in client.status()):  # of an earlier job
        return {}
    text = zlib.decompressobj()
    first = text.decompress(found[8:]).decode(errors="replace")
    if not text.eof:
        raise ArgumentError("the ranks were given different things, too long to be shown", fix="let all run one script")
    return {"the first rank to come": first, f"rank {client.worker}": mine}


def agreed(client: Client, rank: int, values: Mapping[str, float]) -> dict[str, float]:
    """The numbers of the first rank in place of these; ends a clock. ArgumentError if others ask at another step."""
    mine, step = np.array([*values.values()], np.float64), client.step
    name = f"{AGREEMENT} {step}"  # a new life of a worker must not find what was agreed on before it
    parameter = {name: Parameter(mine.shape, "float64", rule="add", reduce="sum")}
    try:
        if rank == 0:
            client.create(parameter, {name: mine})
        client.clock().wait()
        if rank:
            client.create(parameter, {name: mine})
    except RefusedError as error:
        if AGREEMENT not in str(error):
            raise
        raise ArgumentError(
            f"rank {rank} has made {step} steps when it asks for {', '.join(values)}, others have made more or fewer",
            fix="give all ranks as many batches an epoch, whatever each has of the data",
        ) from error
    return dict(zip(values, client.pull(name).wait().tolist()))
