"""Clusters as plain text: `cluster("dgx-h100:16")` reads `hetu/plan/clusters/dgx-h100.toml`, or a file of your own.

A file says how many devices a host has, what each computes with, and what joins them inside of a host and between
hosts. Left out: hosts that are not alike, for which `Cluster` is written in Python.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from ...core.errors import ArgumentError, HetuError, did_you_mean, public
from ...dist.comm.clock import Link
from ...ranges import AtLeast0, AtLeast1, Endless, Range
from .links import Cluster, DeviceFigures

KNOWN = Path(__file__).parent.parent / "clusters"
EXAMPLE = KNOWN / "dgx-h100.toml"
LIMIT = 1 << 16  # bytes of a file
MOST = 1 << 16  # hosts
T = TypeVar("T")


def cluster(described: str | os.PathLike[str]) -> Cluster:
    """The cluster that a text describes: a known name or the path of a `.toml` file, and behind a colon how many hosts.

    Known are those of `hetu/plan/clusters/`, by data sheets: each figure stands there with its source, and a file of
    your own may begin as a copy. Without a colon the file says how many `hosts` there are, one if it does not.
    Operations are those of dense products in 16 bits (`flops`, and `peak` by the sheet) and in float32 (`flops32`), and
    bytes over links those in one direction. ArgumentError says what is wrong with a file, and where.

    >>> dgx = cluster("dgx-h100:16")
    >>> dgx.name, dgx.world_size, dgx.device.memory
    ('16 x DGX H100', 128, 80000000000.0)
    """
    text = os.fspath(described)
    name, hosts = re.fullmatch(r"(.*?)(?::(\w*))?", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if not name.endswith(".toml") and name not in known():
        fix = f"{did_you_mean(name, known())} (or pass the path of a .toml file)"
        raise ArgumentError(f"there is no cluster {name!r:.80}", fix=fix)
    if hosts is not None and not (hosts.isdecimal() and 1 <= int(hosts) <= MOST):
        raise ArgumentError(f"{text!r:.80} has {hosts!r:.20} hosts", fix=f"write a number of hosts: {name}:16")
    path = Path(name) if name.endswith(".toml") else KNOWN / f"{name}.toml"
    tables = read_toml(path)
    parts: dict[str, Callable[..., Any]] = {"device": DeviceFigures, "inner": _link, "outer": _link}
    for key, make in parts.items():
        if key in tables:
            tables[key] = made(make, tables[key], f"{path}, [{key}]")
    if hosts is not None:
        tables["hosts"] = int(hosts)
    return made(_cluster, tables, f"{path}")


def known() -> list[str]:
    """The names of clusters that are shipped."""
    return sorted(path.stem for path in KNOWN.glob("*.toml"))


@public
def _cluster(
    *,
    name: str,
    devices: AtLeast1,
    device: DeviceFigures,
    inner: Link,
    outer: Link,
    hosts: Annotated[int, Range(1, MOST)] = 1,
    price: AtLeast0 | None = None,
    rails: AtLeast1 = 1,
) -> Cluster:
    return Cluster((devices,) * hosts, inner, outer, device, f"{hosts} x {name}", price, rails)


@public
def _link(*, latency: AtLeast0, bandwidth: Endless) -> Link:
    return Link(latency, bandwidth)


def read_toml(path: Path) -> dict[str, Any]:
    """What a file of TOML says; ArgumentError where there is none."""
    try:
        with path.open("rb") as file:
            content = file.read(LIMIT + 1)
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}", fix="pass the path of a .toml file") from None
    if len(content) > LIMIT:
        raise ArgumentError(f"{path} has more than {LIMIT >> 10} KiB", fix="pass a file that describes one thing")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is no TOML: {error!s:.200}", fix=f"write it as {EXAMPLE}") from None


def made(make: Callable[..., T], table: Any, where: str) -> T:
    """What a function makes of the keys of a table; ArgumentError says `where` one is wrong, missing or unknown."""
    if not isinstance(table, dict):
        raise ArgumentError(f"{where}: got {table!r:.80}", fix="write a table: keys with = below a line in brackets")
    try:
        return make(**table)
    except HetuError as error:
        _, _, message = error.message.partition(" ")  # without the name of the function
        raise ArgumentError(f"{where}: {message}", fix=error.fix.replace("=...", " = ...")) from None
