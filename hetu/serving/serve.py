"""`hetu serve`: a model in a file answers HTTP requests, several of them in one run.

It listens to this machine alone, unless a token is asked of who comes from elsewhere. Needs the extra `serve`.
"""

from __future__ import annotations

import argparse
import importlib
import secrets
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import ArgumentError, HetuError, MissingDependencyError
from ..ps.wire.handshake import is_loopback, read_private, write_private
from ..script import number, positive
from .batches import SharedRuns
from .http import Service
from .predictor import Predictor

TURN = 1e-3  # seconds of Python after which the thread of the model, or of the sockets, gives way to the other
LAST = 10  # seconds for requests under way, once it is to stop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words after `hetu serve`."""
    add = parser.add_argument
    add("model", type=Path, help="what ht.save_model wrote, or a file of ONNX")
    add("--host", default="127.0.0.1", help="the address to listen to (default: %(default)s, this machine alone)")
    add("--port", type=partial(positive, least=0), default=8000, help="0 is any that is free (default: %(default)s)")
    add("--token", type=Path, metavar="FILE", help="holds what requests have to show; made if it is not there")
    add("--log", action="store_true", help="print a line for each request")
    for flag, kind, default, unit, line in (
        ("--max-batch", positive, 32, "ROWS", "how many rows of several requests share a run"),
        ("--wait", number, 0, "MS", "how long a request waits for others, if the model is at rest"),
        ("--queue", positive, 256, "N", "how many requests may wait; more are answered with 503"),
        ("--max-body", number, 16, "MB", "the largest body of a request; a larger one is answered with 413"),
    ):
        add(flag, type=kind, default=default, metavar=unit, help=f"{line} (default: %(default)s)")


def main(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; what is under way is answered before it ends."""
    server = _uvicorn()
    token = _token(args.token) if args.token else ""
    if not token and not is_loopback(f"tcp://{args.host}:0"):
        said = f"{args.host} is reachable by others and no token is given"
        raise ArgumentError(said, fix="use 127.0.0.1, or --token FILE, which is made if it is not there")
    predictor = Predictor(args.model, most_rows=args.max_batch)
    runs = SharedRuns(predictor, args.max_batch, args.wait / 1e3, args.queue)
    service = Service(runs, int(args.max_body * 1e6), token)
    level = "info" if args.log else "warning"
    config = server.Config(
        service, lifespan="off", log_level=level, access_log=args.log, timeout_graceful_shutdown=LAST
    )
    with _listening(args.host, args.port) as listening:
        print(_shown(service, f"http://{_named(listening)}", args.token), flush=True)
        sys.setswitchinterval(TURN)
        signal.signal(signal.SIGTERM, lambda *_: None)  # which uvicorn hears, and then raises once more
        server.Server(config).run(sockets=[listening])
    print("stopped")
    return 0


def _uvicorn() -> Any:
    try:
        return importlib.import_module("uvicorn")
    except ImportError:
        raise MissingDependencyError("hetu serve needs the package uvicorn", fix="pip install uvicorn") from None


def _token(path: Path) -> str:
    """The token in a file, a new one if there is none; ArgumentError if others can read it."""
    try:
        if not path.exists():
            write_private(path, secrets.token_urlsafe(32))
        token = read_private(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--token: {error}", fix="name a file of this user, or one to make") from None
    if not token:
        raise ArgumentError(f"{path} is empty", fix="remove it, so that one is made")
    return token


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.create_server((host, port), family=family, backlog=1024)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else an answer's body waits 40 ms behind its head
        return made
    except (OSError, OverflowError) as error:
        fix = "choose another --port, 0 for any that is free, or a --host of this machine"
        raise ArgumentError(f"cannot listen to {host}, port {port}: {error}", fix=fix) from None


def _named(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _fits(service: Service) -> bool:
    """Whether the example is one; it also makes the first program."""
    try:
        return bool(service.predictor.predict(service.example()))
    except HetuError:  # where open sizes have to be others
        return False


def _shown(service: Service, address: str, token: Path | None) -> str:
    """What is served, and how to ask."""
    predictor, key = service.predictor, f' -H "authorization: Bearer $(cat {token})"' if token else ""
    example = (
        f"curl -s{key} {address}/example | curl -s{key} {address}/predict -H 'content-type: application/json' -d @-"
    )
    rows = [
        ("serving", f"{predictor.name} at {address}"),
        *(("input", f"{name} {type_}") for name, type_ in predictor.inputs.items()),
        *(("output", f"{name} {type_}") for name, type_ in predictor.outputs.items()),
        *[("try it", example)] * _fits(service),
        ("stop it", "Ctrl-C, or SIGTERM"),
    ]
    return "\n".join(f"{key:<8} {value}" for key, value in rows)
