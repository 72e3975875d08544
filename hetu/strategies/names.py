"""Names of what servers keep for the states of executors, and when it goes: with the last state of all workers.

A worker frees what belonged to a state that nobody has any more as it makes its next executor, in whatever order other
workers do: a name is never given twice, so that no worker's garbage decides what another calls its parameters.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable

from ..core.state import State
from ..ps.wire.client import Client

USED: weakref.WeakKeyDictionary[Client, set[str]] = weakref.WeakKeyDictionary()
GONE: weakref.WeakKeyDictionary[Client, deque[str]] = weakref.WeakKeyDictionary()  # not freed yet


def new_name(name: str, client: Client) -> str:
    """The name of a new parameter: another executor may have one that is called alike."""
    used = USED.setdefault(client, set())
    numbered = (f"{name} ({number})" for number in itertools.count(2))
    found = next(free for free in itertools.chain([name], numbered) if free not in used | client.parameters.keys())
    used.add(found)
    return found


def free_after(state: State, names: Iterable[str], client: Client) -> None:
    """Have these parameters freed when nobody has the state any more; from a thread that collects garbage nothing is
    sent."""
    weakref.finalize(state, GONE.setdefault(client, deque()).extend, [*names]).atexit = False


def free_gone(client: Client) -> None:
    """Free what belonged to states that are gone."""
    gone = GONE.setdefault(client, deque())
    names = [gone.popleft() for _ in range(len(gone))]
    for name in names:
        client.asked.pop(name, None)
    client.free(names).wait()
