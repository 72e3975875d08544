"""What a model answers over HTTP, as an ASGI application: paths, bodies, limits, and errors as JSON.

GET /health, /model and /example; POST /predict takes `{"input": rows}` as JSON, or named arrays as safetensors
(application/octet-stream), and answers in kind. Nothing that comes is code. Left out: encryption, several models, and
whoever asks too often; that is for a proxy before it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from ..checkpoint import DTYPES, content
from ..core.errors import HetuError, did_you_mean
from ..core.types import Dim, TensorType, as_dtype
from ..ps.wire.handshake import is_loopback
from .batches import SharedRuns
from .predictor import NamedArrays

JSON, BINARY = "application/json", "application/octet-stream"
GET = "GET", "HEAD"
PATHS = {"/health": GET, "/model": GET, "/example": GET, "/predict": ("POST",)}
AGAIN = "ask again later", ("retry-after", "1")
READING = 30.0  # seconds for a body to arrive
BODIES = 8  # as many of the largest may be in memory


class AnswerError(Exception):
    """A request that is answered with an error: its status, what is wrong, what to do, and headers that say so too."""


class Service:
    """The application. `token` is what a request has to show but for /health; without one, only this machine is served,
    by its own names, so that no page of a browser reaches it by another."""

    def __init__(self, batches: SharedRuns, most_bytes: int, token: str = "") -> None:
        self.batches, self.most_bytes, self.token = batches, most_bytes, token
        self.predictor, self.held = batches.predictor, 0

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        """Answer one request."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        more: list[tuple[str, str]] = []
        try:
            self._check(scope["path"], scope["method"], headers)
            status, kind, body = await self._answer(scope["path"], headers, receive)
        except AnswerError as error:
            (status, said, fix, *more), kind = error.args, JSON
            body = as_json({"error": said, "fix": fix})
        except Exception as error:  # of the model: it is told that there was one, and in the log which
            print(f"hetu serve: {error!r}", flush=True)
            status, kind, body = 500, JSON, as_json({"error": f"the model failed: {type(error).__name__}", "fix": ""})
        told = ("content-type", kind), ("content-length", str(len(body))), *more
        head = [(name.encode(), value.encode()) for name, value in told]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": body})

    def _check(self, path: str, method: str, headers: Mapping[str, str]) -> None:
        """AnswerError for who may not ask, and what is not there."""
        host = re.sub(r":\d*$", "", headers.get("host", "localhost")).lower()  # which every browser tells
        if not self.token and not (host and is_loopback(f"tcp://{host}:80")):
            raise AnswerError(403, f"this machine is not called {host!r:.60}", "ask 127.0.0.1, or serve with --token")
        shown = headers.get("authorization", "").encode()
        if self.token and path != "/health" and not hmac.compare_digest(shown, f"Bearer {self.token}".encode()):
            fix, head = "send the header authorization: Bearer TOKEN", ("www-authenticate", "Bearer")
            raise AnswerError(401, "no token, or a wrong one", fix, head)
        if path not in PATHS:
            raise AnswerError(404, f"there is no {path!r:.60}", did_you_mean(path, PATHS))
        if method not in (known := PATHS[path]):
            fix, head = f"ask with {known[0]} {path}", ("allow", ", ".join(known))
            raise AnswerError(405, f"got {method}, wanted {known[0]}", fix, head)

    async def _answer(self, path: str, headers: Mapping[str, str], receive: Any) -> tuple[int, str, bytes]:
        if path == "/health":
            return 200, JSON, as_json({"status": "ok", "waiting": len(self.batches.queue), **self.batches.counts})
        if path == "/model":
            return 200, JSON, as_json(self.described())
        if path == "/example":
            return 200, JSON, as_json(self.example())
        kind = headers.get("content-type", "none").partition(";")[0].strip().lower()
        if kind not in (JSON, BINARY):
            raise AnswerError(415, f"got content-type {kind!r:.60}", f"send {JSON}, or safetensors as {BINARY}")
        told = headers.get("content-length", "")
        if not told.isdecimal() or "transfer-encoding" in headers:
            raise AnswerError(411, "the length of the body is not told", "send it whole, with a content-length")
        if (size := int(told)) > self.most_bytes:
            raise AnswerError(413, f"got {size} bytes, at most {self.most_bytes} are read", "send fewer rows at a time")
        if self.held + size > BODIES * self.most_bytes:
            raise AnswerError(503, "too many bodies are being read", *AGAIN)
        self.held += size
        try:
            made = await self._predicted(read_arrays(kind, await _body(receive)))
        finally:
            self.held -= size
        if kind == JSON:
            return 200, kind, as_json({n: numbers(a) for n, a in made.items()})
        return 200, kind, b"".join(content(made, {})[1])

    async def _predicted(self, arrays: Mapping[str, Any]) -> NamedArrays:
        try:
            return await self.batches.predict(self.predictor.fitting(arrays))
        except asyncio.QueueFull:
            raise AnswerError(503, f"{len(self.batches.queue)} requests wait already", *AGAIN) from None
        except asyncio.CancelledError:  # by a server that has waited for it as long as it waits
            raise AnswerError(503, "the server ends", *AGAIN) from None
        except MemoryError as error:
            raise AnswerError(413, str(getattr(error, "message", error)), "send fewer rows, or smaller ones") from None
        except HetuError as error:
            raise AnswerError(400, error.message, error.fix) from None

    def described(self) -> dict[str, Any]:
        """What the model takes and gives; null is a size that is open."""
        types = {"inputs": self.predictor.inputs, "outputs": self.predictor.outputs}
        return {"model": self.predictor.name, "max_batch": self.batches.most_rows} | {
            way: {name: {"dtype": t.dtype.name, "shape": [None if isinstance(s, Dim) else s for s in t.shape]}
                  for name, t in found.items()} for way, found in types.items()
        }  # fmt: skip

    def example(self) -> dict[str, Any]:
        """A body to begin with: one row of zeros, 8 where another size is open."""

        def zeros(type_: TensorType) -> Any:
            sizes = ((8 if axis else 1) if isinstance(s, Dim) else s for axis, s in enumerate(type_.shape))
            return np.zeros([*sizes], type_.dtype).tolist()

        return {name: zeros(type_) for name, type_ in self.predictor.inputs.items()}


async def _body(receive: Callable[[], Awaitable[Any]]) -> bytes:
    """The body of a request, as long as its header says."""
    body = bytearray()
    try:
        async with asyncio.timeout(READING):
            while (message := await receive())["type"] != "http.disconnect":
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise AnswerError(408, f"the body did not arrive in {READING:g} s", "send it at once") from None
    raise AnswerError(400, "the request was given up", "")


def read_arrays(kind: str, body: bytes) -> dict[str, Any]:
    """What is fed, by name."""
    from safetensors import SafetensorError, deserialize

    arrays: Callable[[bytes], Any] = deserialize  # which has no types
    try:
        found = json.loads(body) if kind == JSON else {name: _array(told) for name, told in arrays(body)}
    except (ValueError, KeyError, RecursionError, SafetensorError, HetuError) as error:
        raise AnswerError(400, f"the body is no {kind}: {error!s:.200}", "GET /example has one as JSON") from None
    if not isinstance(found, dict):
        raise AnswerError(400, f"got a {type(found).__name__}, wanted an object", 'send {"input": rows}')
    return found


def _array(told: Mapping[str, Any]) -> np.ndarray:
    return np.ndarray(told["shape"], as_dtype(DTYPES[told["dtype"]]), told["data"])


def numbers(array: np.ndarray) -> Any:
    """As JSON has them: null for what is no finite number."""
    finite = np.isfinite(array)
    return array.tolist() if finite.all() else np.where(finite, array, np.array(None)).tolist()


def as_json(data: Any) -> bytes:
    return json.dumps(data, allow_nan=False).encode() + b"\n"
