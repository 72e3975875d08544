"""The file behind `heturun -c`: which hosts a job has, and how many workers and servers run on each.

    [[hosts]]
    name = "node1"
    workers = 4
    servers = 1
    chief = true

It is TOML, or JSON with the same keys, since Python reads both; a `.yml` file may hold the JSON form, which is YAML
too. Rank 0 and the launcher are on the chief. Ignored on purpose: different scripts or devices per host.
"""

from __future__ import annotations

import json
import socket
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, did_you_mean

LOCAL = ("localhost", "127.0.0.1", "::1")


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
    """The hosts of a file, the chief first. ArgumentError says what is wrong with it."""
    path = Path(path)
    try:
        text = path.read_text("utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}", fix="name a file that describes the hosts") from None
    except ValueError as error:
        yaml = path.suffix in (".yml", ".yaml")
        fix = '[[hosts]] with name = "node1", workers = 4, in a file that ends with .toml'
        what = "not in the JSON form of YAML" if yaml else f"no {'TOML' if path.suffix == '.toml' else 'JSON'}"
        raise ArgumentError(f"{path} is {what} ({error})", fix=f"write {fix}") from None
    return parse_cluster(data)


def parse_cluster(data: Any) -> tuple[Host, ...]:
    """The hosts in `{"hosts": [{"name": ..., "workers": ...}, ...]}`, checked, the chief first.

    >>> [host.name for host in parse_cluster({"hosts": [{"name": "a", "workers": 1}, {"name": "b", "chief": True}]})]
    ['b', 'a']
    """
    rows = data.get("hosts") if isinstance(data, Mapping) else None
    if not isinstance(rows, list) or not rows:
        raise ArgumentError("the cluster has no list of hosts", fix='write [[hosts]] and name = "node1", workers = 4')
    hosts = [_host(row) for row in rows]
    if twice := [name for name, count in Counter(host.name for host in hosts).items() if count > 1]:
        raise ArgumentError(f"host {twice[0]!r} is listed twice", fix="add its workers up in one entry")
    chiefs = [host.name for host in hosts if host.chief]
    if len(chiefs) > 1 or (len(hosts) > 1 and not chiefs):
        raise ArgumentError(
            f"{len(chiefs)} chiefs {chiefs} among {len(hosts)} hosts",
            fix="set chief = true for one host: the one heturun is started on",
        )
    if not sum(host.workers for host in hosts):
        raise ArgumentError("no host has a worker", fix="set workers = 1 or more for some host")
    return tuple(sorted(hosts, key=lambda host: not host.chief))


def _host(row: Any) -> Host:
    kinds = {"name": str, "workers": int, "servers": int, "chief": bool}
    if not isinstance(row, Mapping) or "name" not in row:
        raise ArgumentError(f"a host without a name: {row!r}", fix='write name = "node1"')
    for key, value in row.items():
        if key not in kinds:
            known = [field.name for field in fields(Host)]
            raise ArgumentError(f"host {row['name']!r} has an unknown key {key!r}", fix=did_you_mean(key, known))
        if type(value) is not kinds[key] or (kinds[key] is int and value < 0):
            raise ArgumentError(f"host {row['name']!r}: {key} = {value!r}", fix=f"give a {kinds[key].__name__} >= 0")
    if not row["name"] or row["name"].startswith("-") or any(c in row["name"] for c in ", :\t\n"):
        raise ArgumentError(f"{row['name']!r} is no name of a host", fix="give one host name or address")
    return Host(**row)


def mpiexec_options(hosts: Sequence[Host], is_open_mpi: bool, variables: Sequence[str]) -> list[str]:
    """What mpiexec needs to start the workers there: over ssh, unless it runs under a scheduler that it knows.

    Hydra (MPICH, Intel MPI) takes the environment along by itself; Open MPI is told the names of the variables.
    """
    working = [host for host in hosts if host.workers]
    if all(host.is_local for host in working):
        return []
    # The others must be able to call back, so this host goes by its name.
    names = [socket.gethostname() if host.name in LOCAL else host.name for host in working]
    places = ",".join(f"{name}:{host.workers}" for name, host in zip(names, working))
    if is_open_mpi:
        return ["--host", places, *(option for name in variables for option in ("-x", name))]
    return ["-hosts", places]
