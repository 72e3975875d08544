"""`hetu ps status`: the clocks, waiting workers, traffic, latencies and tables of a running job's parameter servers.

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
from ..store.messages import Kind, Message, RefusedError, decode, encode
from .environment import ADDRESSES, KEYS, TOKEN
from .handshake import Handshake, Introduction, dealer, read_keys
from .transport import ServerTimeoutError
from .view import as_text, looks_at

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
        "status", help="clocks, staleness, throughput, latencies and tables of a running job", description=__doc__
    )
    status.formatter_class = argparse.RawDescriptionHelpFormatter
    status.add_argument("--job", type=Path, metavar="FILE", help="servers.json of the job (default: the newest)")
    status.add_argument("--json", action="store_true", help="print a JSON object per look")
    status.add_argument("--watch", action="store_true", help="look again until Ctrl-C")
    status.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="time between two looks (default: %(default)s)"
    )
    status.add_argument(
        "--timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long a server may take (default: %(default)s)",
    )


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
            looks = looks_at(job.addresses, before, now)
            text = json.dumps({"servers": looks}) if args.json else as_text(looks)
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
        asking = [Introduction(address, job.token) for address in job.addresses]
        for socket, introduction in zip(sockets, asking):
            _ask(socket, introduction)
        return [_answer(zmq, socket, introduction, until) for socket, introduction in zip(sockets, asking)]
    finally:
        context.destroy(linger=0)


def _ask(socket: Any, introduction: Introduction) -> None:
    socket.send_multipart(encode(Message(Kind.STATUS, seq=1, meta=introduction.facts)))


def _answer(zmq: Any, socket: Any, introduction: Introduction, until: float) -> dict[str, Any]:
    handshake, address = Handshake(zmq, socket, introduction.address), introduction.address
    while not socket.poll(20, zmq.POLLIN):
        handshake.check()
        if time.monotonic() >= until:
            fix = "has the job ended, or is the server frozen?"
            raise ServerTimeoutError(f"no answer from {address}: {handshake.found}", fix=fix)
    answer = decode(socket.recv_multipart())
    if answer.kind is Kind.HELLO and introduction.hears(answer):
        _ask(socket, introduction)
        return _answer(zmq, socket, introduction, until)
    if answer.kind is Kind.ERROR:
        raise RefusedError(str(answer.facts.get("code")), str(answer.facts.get("message")))
    return answer.facts
