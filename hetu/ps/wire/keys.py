"""Which addresses are safe without encryption, and key files that only their owner can read.

On loopback a token is enough, because a user who can read it can read the whole job. Any other address needs CURVE (D.
Bernstein, "CurveCP"; ZeroMQ RFC 26) with a key pair for the server and one for each worker.
"""

from __future__ import annotations

import ipaddress
import json
import os
import stat
from pathlib import Path
from typing import Any

from ...core.errors import ArgumentError
from ...core.state import FilePath as FilePath


def is_loopback(address: str) -> bool:
    """Whether `address` (tcp://host:port) can be reached from this machine only.

    >>> is_loopback("tcp://127.0.0.1:*"), is_loopback("tcp://0.0.0.0:5000"), is_loopback("tcp://node7:5000")
    (True, False, False)

    Of names only localhost is (RFC 6761, section 6.3).
    """
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or not host:
        raise ArgumentError(f"the address {address!r}", fix="write it as tcp://host:port, with * for any free port")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # any other name may point anywhere


def check_address(address: str, key_file: FilePath) -> None:
    """Refuse to speak beyond this machine without encryption."""
    if not key_file and not is_loopback(address):
        raise ArgumentError(
            f"{address} is reachable by others and no keys are given",
            fix="use 127.0.0.1, or make keys with hetu.ps.wire.server.make_keys and pass key_file=",
        )


def write_keys(path: Path, keys: dict[str, Any]) -> None:
    """Write a new file that only its owner may read; an existing file is never overwritten."""
    write_private(path, json.dumps(keys))


def read_keys(path: FilePath) -> dict[str, Any]:
    """The keys in a file; ArgumentError if others could have read or written it."""
    keys: dict[str, Any] = json.loads(read_private(path))
    return keys


def write_private(path: Path, text: str) -> None:
    """As `write_keys`, of any text."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def read_private(path: FilePath) -> str:
    """As `read_keys`, of any text."""
    mode = os.stat(path).st_mode
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ArgumentError(f"{path} is open to others ({stat.filemode(mode)})", fix=f"chmod 600 {path}")
    return Path(path).read_text("utf-8")
