"""`hetu ps status`: the clocks, waiting workers, traffic and cache hits of a running job's parameter servers.

It asks with the job's token but is no worker, so it changes and delays nothing. `heturun` leaves a file with addresses
and token in the job's directory, which only its owner can read; without `--job` the newest one is taken. A row that a
cache asks for counts as a hit if its copy was fresh enough; workers count more (see `CachedTable.counters`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ArgumentError
from ..store.consistency import consistency
from ..store.messages import Kind, Message, RefusedError, decode, encode
from .environment import ADDRESSES, KEYS, TOKEN
from .handshake import Handshake, dealer, shown
from .keys import read_keys
from .transport import ServerTimeoutError

JOB_FILES = ("heturun-*/servers.json", ".heturun-*/servers.json")  # below the temporary folder, below this one
CLEAR = "\x1b[H\x1b[2J"


@dataclass(frozen=True)
class ServerJob:
    """How to reach the servers of a job."""

    addresses: tuple[str, ...]
    token: str
    key_file: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words after `hetu ps`."""
    status = parser.add_subparsers(dest="ps_command", required=True).add_parser(
        "status", help="clocks, staleness, throughput and cache hits of a running job", description=__doc__
    )
    status.formatter_class = argparse.RawDescriptionHelpFormatter
    status.add_argument("--job", type=Path, metavar="FILE", help="servers.json of the job (default: the newest)")
    status.add_argument("--json", action="store_true", help="print a JSON object per look")
    status.add_argument("--watch", action="store_true", help="look again until Ctrl-C")
    status.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="time between two looks")
    status.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="how long a server may take")


def main(args: argparse.Namespace) -> int:
    """Show the status; returns 0, and raises the errors of the job's file and servers."""
    if not args.every > 0:
        raise ArgumentError(f"--every {args.every}", fix="use a time above 0 seconds")
    job = find_job(args.job)
    before = ask(job, args.timeout)
    try:
        while True:
            time.sleep(args.every)
            now = ask(job, args.timeout)
            looks = [{"address": a, **new, **rates(old, new)} for a, old, new in zip(job.addresses, before, now)]
            text = json.dumps({"servers": looks}) if args.json else "\n\n".join(map(show, looks))
            print((CLEAR if args.watch and not args.json and sys.stdout.isatty() else "") + text, flush=True)
            if not args.watch:
                return 0
            before = now
    except KeyboardInterrupt:
        return 0


def find_job(file: Path | None) -> ServerJob:
    """The job of a file, or of the environment of a rank, or of the newest file that `heturun` left."""
    if file is None and ADDRESSES in os.environ:
        return _job(os.environ)
    if file is None:
        places = zip((tempfile.gettempdir(), "."), JOB_FILES)
        found = [path for folder, pattern in places for path in Path(folder).glob(pattern) if os.access(path, os.R_OK)]
        if not found:
            raise ArgumentError("no job with servers runs here", fix="start one with heturun -s, or give --job")
        file = max(found, key=lambda path: path.stat().st_mtime)
        if len(found) > 1:
            print(f"{len(found)} jobs run here, this is the newest; the others: --job FILE", file=sys.stderr)
    if not file.is_file():
        raise ArgumentError(f"there is no {str(file)!r}", fix="name the servers.json in the job's directory")
    return _job(read_keys(file))


def _job(variables: Any) -> ServerJob:
    try:
        addresses, token, keys = variables[ADDRESSES], variables[TOKEN], variables.get(KEYS)
    except (KeyError, TypeError):
        raise ArgumentError(f"a job without {ADDRESSES} and {TOKEN}", fix="name a file that heturun wrote") from None
    return ServerJob(tuple(addresses.split(",")), token, str(Path(keys) / "worker-0.json") if keys else "")


def ask(job: ServerJob, timeout: float = 5.0) -> list[dict[str, Any]]:
    """The state of each server; RefusedError for a wrong token, ServerTimeoutError if a server does not answer.

    >>> from hetu.ps import Options, ServerProcess
    >>> with ServerProcess(Options(workers=2, token="secret", consistency="ssp:3")) as server:
    ...     [found] = ask(ServerJob((server.address,), "secret"))
    >>> found["clocks"], found["consistency"]
    ({'0': 0, '1': 0}, 'ssp:3')
    """
    import zmq

    context, until = zmq.Context(), time.monotonic() + timeout
    try:
        sockets = [dealer(zmq, context, a, job.token, job.key_file, watched=True) for a in job.addresses]
        for socket in sockets:
            socket.send_multipart(encode(Message(Kind.STATUS, seq=1, meta={"token": shown(job.token)})))
        return [_answer(zmq, socket, address, until) for socket, address in zip(sockets, job.addresses)]
    finally:
        context.destroy(linger=0)


def _answer(zmq: Any, socket: Any, address: str, until: float) -> dict[str, Any]:
    handshake = Handshake(zmq, socket, address)
    while not socket.poll(20, zmq.POLLIN):
        handshake.check()
        if time.monotonic() >= until:
            fix = "has the job ended, or is the server frozen?"
            raise ServerTimeoutError(f"no answer from {address}: {handshake.found}", fix=fix)
    answer = decode(socket.recv_multipart())
    if answer.kind is Kind.ERROR:
        raise RefusedError(str(answer.facts.get("code")), str(answer.facts.get("message")))
    return answer.facts


def rates(old: dict[str, Any], new: dict[str, Any]) -> dict[str, float]:
    """Requests and bytes per second between two looks at one server; after a restart, since its start.

    >>> first = {"seconds": 1.0, "requests": {"push": 5}, "received": 0, "sent": 100}
    >>> rates(first, {"seconds": 3.0, "requests": {"push": 9, "pull": 6}, "received": 8, "sent": 100})
    {'requests_per_second': 5.0, 'received_per_second': 4.0, 'sent_per_second': 0.0}
    """
    if new["seconds"] < old["seconds"]:
        old = {"seconds": 0.0, "requests": {}, "received": 0, "sent": 0}
    passed = max(new["seconds"] - old["seconds"], 1e-9)
    return {
        "requests_per_second": (sum(new["requests"].values()) - sum(old["requests"].values())) / passed,
        "received_per_second": (new["received"] - old["received"]) / passed,
        "sent_per_second": (new["sent"] - old["sent"]) / passed,
    }


def show(server: dict[str, Any]) -> str:
    """One server as text."""
    mode, rows = consistency(server["consistency"]), server["rows"]
    foremost = max(server["clocks"].values(), default=0)
    tables = f"{server['tables']} table{'s' * (server['tables'] != 1)}"
    lines = [f"{server['address']}  {mode}, up {server['seconds']:.0f} s, {tables}, {_size(server['bytes'])}"]
    if server["restored"]:
        lines.append("  goes on from a snapshot at clock {clock}, which was {age:g} s old".format(**server["restored"]))
    lines.append("  worker     clock    behind        silent")
    for worker, clock in server["clocks"].items():
        silent = server["silent"][worker]
        seen = "not here yet" if silent is None else f"{silent:.1f} s"
        lines.append(f"  {worker:>6}{clock:>10,}{foremost - clock:>10}{seen:>14}")
    lines.append(f"  lead {server['lead']}, largest {server['widest']} (allowed {mode.staleness + 1:g}); "
                 f"{server['parked']} requests wait")  # fmt: skip
    lines.append(f"  {server['requests_per_second']:,.0f} requests/s, {_size(server['received_per_second'])}/s in, "
                 f"{_size(server['sent_per_second'])}/s out")  # fmt: skip
    if rows["asked"]:
        lines.append(f"  cache: {1 - rows['fetched'] / rows['asked']:.1%} of {rows['asked']:,} rows were fresh")
    return "\n".join(lines)


def _size(nbytes: float) -> str:
    """
    >>> _size(123), _size(4_500_000)
    ('123 B', '4.5 MB')
    """
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
