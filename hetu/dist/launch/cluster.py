"""The file behind `heturun -c cluster.yml`: which hosts a job has, and how many workers and servers run on each.

    hosts:
      - name: node1
        workers: 4
        servers: 1
        chief: true
      - name: node2
        workers: 4

It is YAML (or JSON, which is YAML too), read into strings, numbers and truth values only.
Rank 0 and the launcher are on the chief. All hosts run the same script on the same kind of device.
"""

from __future__ import annotations

import reprlib
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    import yaml

LOCAL = ("localhost", "127.0.0.1", "::1")
LIMIT = 1 << 16  # bytes of a file
KINDS: dict[str, type] = {"name": str, "workers": int, "servers": int, "chief": bool}
EXAMPLE = 'write "hosts:", and below it lines such as "  - {name: node1, workers: 4, chief: true}"'


@dataclass(frozen=True)
class Host:
    """One host of a job."""

    name: str
    workers: int = 0
    servers: int = 0
    chief: bool = False

    @property
    def is_local(self) -> bool:
        return self.name in LOCAL or self.name in (socket.gethostname(), socket.getfqdn())


def read_cluster(path: str | Path) -> tuple[Host, ...]:
    """The hosts of a file, the chief first. ArgumentError says what is wrong with it, and in which line."""
    try:
        with open(path, "rb") as file:
            text = file.read(LIMIT + 1)
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}", fix="name a file that describes the hosts") from None
    if len(text) > LIMIT:
        raise ArgumentError(f"{path} has more than {LIMIT >> 10} KiB", fix="name a file that describes the hosts")
    try:
        return parse_cluster(text)
    except ArgumentError as error:
        raise ArgumentError(f"{path}, {error.message}", fix=error.fix) from None


def parse_cluster(text: str | bytes) -> tuple[Host, ...]:
    """The hosts that a text describes, checked, the chief first.

    >>> [host.name for host in parse_cluster("hosts: [{name: a, workers: 1}, {name: b, chief: true}]")]
    ['b', 'a']
    """
    import yaml  # here, because few jobs need it

    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        rows = _entries(root, ("hosts",), "the cluster").get("hosts")
        if not isinstance(rows, yaml.SequenceNode) or not rows.value:
            raise _wrong(rows or root, "the cluster has no list of hosts", EXAMPLE)
        hosts = [_host(loader, row) for row in rows.value]
    except ArgumentError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _at(mark, f"no YAML ({error.problem or error.context})", EXAMPLE) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # bytes that are no text, 2020-99-99, [[[[...
        raise _at(None, f"no YAML ({type(error).__name__})", EXAMPLE) from None
    _check(hosts)
    return tuple(sorted(hosts, key=lambda host: not host.chief))


def _host(loader: yaml.SafeLoader, row: yaml.Node) -> Host:
    entries = _entries(row, tuple(KINDS), "a host")
    values: dict[str, Any] = {key: loader.construct_object(node, deep=True) for key, node in entries.items()}
    if "name" not in values:
        raise _wrong(row, "a host without a name", 'write "name: node1"')
    name = values["name"]
    for key, value in values.items():
        if type(value) is not KINDS[key] or (isinstance(value, int) and value < 0):
            wanted = {str: "a name", int: "a whole number from 0", bool: "true or false"}[KINDS[key]]
            raise _wrong(entries[key], f"host {reprlib.repr(name)}: {key} is {reprlib.repr(value)}", f"give {wanted}")
    if not _may_be_called(name):
        raise _wrong(entries["name"], f"{reprlib.repr(name)} is no name of a host", "give one host name or address")
    return Host(**values)


def _may_be_called(name: str) -> bool:
    return bool(name) and not name.startswith("-") and not any(c in name for c in ", :\t\n")


def dealt(names: Sequence[str], workers: int, servers: int) -> tuple[Host, ...]:
    """Hosts among which workers and servers are dealt in turn; the first is the chief.

    >>> [(host.name, host.workers, host.servers) for host in dealt(["a", "b"], workers=3, servers=1)]
    [('a', 2, 1), ('b', 1, 0)]
    """
    if wrong := [name for name in names if not _may_be_called(name)]:
        raise ArgumentError(f"{reprlib.repr(wrong[0])} is no name of a host", fix="write them as node1,node2")
    turns = [(len(range(i, workers, len(names))), len(range(i, servers, len(names)))) for i in range(len(names))]
    hosts = tuple(Host(name, *turn, chief=i == 0) for i, (name, turn) in enumerate(zip(names, turns)))
    _check(hosts)
    return hosts


def _entries(node: yaml.Node | None, known: Sequence[str], what: str) -> dict[str, yaml.Node]:
    """The values of a mapping by key; of two equal keys YAML itself would take the last."""
    if node is None or node.id != "mapping":
        raise _wrong(node, f"{what} is not made of keys and values", EXAMPLE)
    found: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.value not in known:
            raise _wrong(key, f"{what} has an unknown key {reprlib.repr(key.value)}", did_you_mean(key.value, known))
        if key.value in found:
            raise _wrong(key, f"{what} has two keys {key.value!r}", "keep one of them")
        found[key.value] = value
    return found


def _wrong(node: yaml.Node | None, message: str, fix: str) -> ArgumentError:
    """An error in the line of a node, if there is one."""
    return _at(None if node is None else node.start_mark, message, fix)


def _at(mark: yaml.Mark | None, message: str, fix: str) -> ArgumentError:
    return ArgumentError(message if mark is None else f"line {mark.line + 1}: {message}", fix=fix)


def _check(hosts: Sequence[Host]) -> None:
    """Whether the hosts make a job together."""
    if twice := [name for name, count in Counter(host.name for host in hosts).items() if count > 1]:
        raise ArgumentError(f"host {twice[0]!r} is listed twice", fix="add its workers up in one entry")
    chiefs = [host.name for host in hosts if host.chief]
    if len(chiefs) > 1 or (len(hosts) > 1 and not chiefs):
        raise ArgumentError(
            f"{len(chiefs)} chiefs {chiefs} among {len(hosts)} hosts",
            fix='write "chief: true" for one host: the one heturun is started on',
        )
    if not sum(host.workers for host in hosts):
        raise ArgumentError("no host has a worker", fix='write "workers: 1" or more for some host')
