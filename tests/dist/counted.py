"""How many calls each communication of 1 KB makes, in Python and from it: `heturun -w 2 python -m tests.dist.counted`.

What a rank does while it polls is left out: that depends on how long it waits.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import numpy as np

from hetu.dist import world
from hetu.dist.comm.call import CollectiveCall

POLLS = "_poll", "look_for_losses"


def count(call) -> int:
    made = []

    def note(frame, event, what):
        if event in ("call", "c_call") and frame.f_code.co_name not in POLLS:
            made.append(what)

    for turn in range(4):  # the first is compared, the second is prepared; all are made in one line
        sys.setprofile(note if turn == 3 else None)
        call()
    sys.setprofile(None)
    return len(made) - 1  # setprofile itself


def counts(comm) -> dict[str, int]:
    x, out = np.ones(256, "f4"), np.empty(256, "f4")
    part, whole = np.empty(x.size // comm.world_size, "f4"), np.empty(x.size * comm.world_size, "f4")
    nothing, peer = np.empty(0, "u1"), 1 - comm.rank
    calls = {
        "all_reduce": CollectiveCall("all_reduce", x, out, "sum"),
        "all_gather": CollectiveCall("all_gather", x, whole),
        "reduce_scatter": CollectiveCall("reduce_scatter", x, part, "max"),
        "all_to_all": CollectiveCall("all_to_all", x, out),
        "all_to_all by counts": CollectiveCall("all_to_all", x, out, counts=((100, 156), (100, 156))),
        "broadcast": CollectiveCall("broadcast", x, x, root=1),
        "barrier": CollectiveCall("barrier", nothing, nothing),
    }
    if comm.rank:
        calls["all_to_all by counts"].counts = ((156, 100), (156, 100))
    found = {
        f"{name}, {how}": count(partial(comm.run, call) if how == "called" else comm.bind(call))
        for name, call in calls.items()
        for how in ("called", "bound")
    }
    trade = [(peer, x)], [(peer, out)]
    return found | {
        "messages, called": count(partial(comm.exchange, *trade)),
        "messages, bound": count(comm.bind_exchange(*trade)),
    }


if __name__ == "__main__":
    comm = world(deadline=60.0)
    found = counts(comm)
    if comm.rank == 0:
        print("counts: " + json.dumps(found))
