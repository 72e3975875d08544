"""`hetu serve`, a process of its own on a free port: good and bad requests, joined runs, limits, and its end."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

import hetu as ht
from hetu.serving.batches import SharedRuns
from hetu.serving.http import Service

pytest.importorskip("uvicorn")
JSON, BINARY = "application/json", "application/octet-stream"
X = np.random.default_rng(0).standard_normal((64, 3)).astype("float32")
DEADLINE = 60  # seconds


def write(folder: Path) -> Path:
    """Rows that are apart, ids that have to lie in a table, and a number that JSON has not."""
    x, ids = ht.placeholder("x", (None, 3)), ht.placeholder("ids", (None, None), "int64")
    with ht.scope("served"):
        y = ht.nn.Linear(3, 2)(x) + ht.sum(ht.nn.Embedding(9, 2)(ids), axis=1)
    outputs = {"y": y, "log": ht.log(x[:, 0])}
    ht.save_model(folder / "small.hetu", outputs, ht.Executor([*outputs.values()]).state)
    return folder / "small.hetu"


@contextmanager
def serving(model: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """The process, its port, and what it says."""
    command = [sys.executable, "-m", "hetu", "serve", str(model), "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    guard = threading.Timer(DEADLINE, process.kill)
    guard.start()
    try:
        said = ""
        while "stop it" not in said:
            line = process.stdout.readline()
            assert line, f"it ended: {said}"
            said += line
        yield process, int(re.findall(r":(\d+)\n", said)[0]), said
    finally:
        process.kill()
        process.communicate()
        guard.cancel()


def ask(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers["content-type"], answer.read()
    finally:
        connection.close()


def predict(port: int, data: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    status, _, body = ask(port, "POST", "/predict", json.dumps(data).encode(), content_type=JSON, **headers)
    return status, json.loads(body)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def port(model: Path) -> Iterator[int]:
    with serving(model, "--max-body", "0.1") as (_, found, _said):
        yield found


def test_both_kinds_of_bodies_are_answered_in_kind(port: int, model: Path) -> None:
    fed = {"x": X[:5], "ids": np.arange(10).reshape(5, 2) % 9}
    wanted = ht.Predictor(model).predict(fed)
    status, kind, body = ask(port, "POST", "/predict", save(fed), content_type=BINARY)
    found = load(body)
    assert (status, kind, found.keys()) == (200, BINARY, wanted.keys())
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)
    status, told = predict(port, {name: array.tolist() for name, array in fed.items()})
    assert status == 200
    np.testing.assert_allclose(told["y"], wanted["y"], rtol=1e-6)
    assert [value is None for value in told["log"]] == [not x > 0 for x in X[:5, 0]]


def test_the_model_is_described_and_its_example_works(port: int) -> None:
    status, kind, body = ask(port, "GET", "/model")
    assert (status, kind) == (200, JSON) and json.loads(body) == {
        "model": "small.hetu",
        "max_batch": 32,
        "inputs": {"x": {"dtype": "float32", "shape": [None, 3]}, "ids": {"dtype": "int64", "shape": [None, None]}},
        "outputs": {"y": {"dtype": "float32", "shape": [None, 2]}, "log": {"dtype": "float32", "shape": [None]}},
    }
    example = json.loads(ask(port, "GET", "/example")[2])
    assert np.shape(example["ids"]) == (1, 8) and predict(port, example)[0] == 200
    assert json.loads(ask(port, "GET", "/health")[2])["status"] == "ok"


GOOD = {"x": [[1, 2, 3]], "ids": [[1, 2]]}
WRONG: dict[str, tuple[Any, int, str, str]] = {
    "an id": (GOOD | {"ids": [[9, 1]]}, 400, "index 9 at position [0, 0] lies outside 0 to 8", ""),
    "a name": ({"x": [[1, 2, 3]], "ID": [[1]]}, 400, "the model has no input 'ID'", "known names: ids, x"),
    "a missing input": ({"x": [[1, 2, 3]]}, 400, "was not given 'ids' i64[?, ?]", "an array for each input"),
    "a shape": (GOOD | {"x": [1, 2, 3]}, 400, "'x' is f32[?, 3], got shape (3,)", ""),
    "unlike rows": (
        GOOD | {"x": [[1, 2, 3]] * 2, "ids": [[1]] * 3},
        400,
        "does not take 'x' (2, 3), 'ids' (3, 1)",
        "give sizes that fit",
    ),
    "a width": (GOOD | {"x": [[1, 2]]}, 400, "'x' is f32[?, 3], got shape (1, 2)", "float32 numbers of shape (?, 3)"),
    "no rows": (GOOD | {"x": []}, 400, "got shape (0,)", "numbers of shape (?, 3), where ? is any size"),
    "ragged": (GOOD | {"x": [[1, 2, 3], [1]]}, 400, "rows of different lengths", "numbers of shape (?, 3)"),
    "a fraction": (GOOD | {"ids": [[0.5]]}, 400, "wants int64, got float64", ""),
    "a text": (GOOD | {"x": "abc"}, 400, "wants float32, got 'abc'", "numbers"),
    "an object": (GOOD | {"x": {"a": 1}}, 400, "wants float32, got {'a': 1}", "numbers"),
    "null": (GOOD | {"x": None}, 400, "wants float32, got None", "numbers"),
    "a great number": (GOOD | {"ids": [[1 << 70]]}, 400, "wants int64", ""),
    "a list": ([1], 400, "got a list, wanted an object", 'send {"input": rows}'),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_answered_with_what_does(case: str, port: int) -> None:
    data, status, said, fix = WRONG[case]
    found, told = predict(port, data)
    assert found == status and said in told["error"] and fix in told["fix"], told
    assert predict(port, GOOD)[0] == 200


def tensors(header: str, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + data


RAW: dict[str, tuple[str, str, bytes, dict[str, str], int, str]] = {
    "no JSON": ("POST", "/predict", b"{", {"content_type": JSON}, 400, "the body is no application/json"),
    "deep": ("POST", "/predict", b"[" * 40_000, {"content_type": JSON}, 400, "the body is no application/json"),
    "nothing": ("POST", "/predict", b"", {"content_type": JSON}, 400, "the body is no application/json"),
    "no safetensors": ("POST", "/predict", b"\x80\x04pickle", {"content_type": BINARY}, 400, "is no application/octet"),
    "beyond the body": (
        "POST", "/predict", tensors('{"x":{"dtype":"F32","shape":[1,3],"data_offsets":[0,12000000]}}'),
        {"content_type": BINARY}, 400, "is no application/octet-stream"),
    "a dtype": (
        "POST", "/predict", tensors('{"x":{"dtype":"Q1","shape":[1,3],"data_offsets":[0,6]}}', b"123456"),
        {"content_type": BINARY}, 400, "is no application/octet-stream"),
    "a form": ("POST", "/predict", b"x=1", {"content_type": "text/plain"}, 415, "got content-type"),
    "no type": ("POST", "/predict", b"{}", {}, 415, "got content-type 'none'"),
    "a long body": ("POST", "/predict", b" " * 100_001, {"content_type": JSON}, 413, "100001 bytes, at most 100000"),
    "a path": ("GET", "/predicts", b"", {}, 404, "there is no '/predicts'"),
    "a file": ("GET", "/../../etc/passwd", b"", {}, 404, "there is no"),
    "a method": ("GET", "/predict", b"", {}, 405, "got GET, wanted POST"),
    "no method": ("GE", "/health", b"", {}, 405, "got GE, wanted GET"),
    "a bad dtype": (
        "POST", "/predict", tensors('{"x":{"dtype":"F8_E4M3","shape":[1,3],"data_offsets":[0,3]}}', b"123"),
        {"content_type": BINARY}, 400, "is no application/octet-stream"),
    "complex numbers": (
        "POST", "/predict", tensors('{"x":{"dtype":"C64","shape":[0,3],"data_offsets":[0,0]}}'),
        {"content_type": BINARY}, 400, "is no application/octet-stream"),
    "no host": ("GET", "/model", b"", {"host": ""}, 403, "this machine is not called ''"),
    "a name that begins so": ("GET", "/model", b"", {"host": "localhost.evil.example:80"}, 403, "is not called"),
    "another host": ("GET", "/model", b"", {"host": "evil.example"}, 403, "this machine is not called 'evil.example'"),
}  # fmt: skip


@pytest.mark.parametrize("case", RAW)
def test_what_is_no_request_is_answered_as_json(case: str, port: int) -> None:
    method, path, body, headers, status, said = RAW[case]
    found, kind, told = ask(port, method, path, body, **headers)
    assert (found, kind) == (status, JSON) and said in json.loads(told)["error"], told
    assert predict(port, GOOD)[0] == 200


UNTOLD = {"none": "", "another": "content-length: 5\r\n"}  # beside which nobody reads a body of any length


@pytest.mark.parametrize("case", UNTOLD)
def test_a_body_of_unknown_length_is_not_read(case: str, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as link:
        link.sendall(
            b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n" + UNTOLD[case].encode() + b"\r\n4\r\n{   \r\n"
        )
        assert link.recv(100).startswith(b"HTTP/1.1 411")


HEADERS: dict[str, tuple[bytes, int, bytes]] = {  # what a client that reads no text goes by
    "a method": (b"PUT /predict HTTP/1.1\r\nhost: localhost\r\n\r\n", 405, b"allow: post"),
    "head": (b"HEAD /health HTTP/1.1\r\nhost: LOCALHOST\r\n\r\n", 200, b"content-type: application/json"),
    "an old probe": (b"GET /health HTTP/1.0\r\n\r\n", 200, b"content-type: application/json"),
    "another port": (b"GET /health HTTP/1.1\r\nhost: [::1]:9\r\n\r\n", 200, b"content-type: application/json"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_are_those_of_http(case: str, port: int) -> None:
    asked, status, wanted = HEADERS[case]
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as link:
        link.sendall(asked)
        told = link.recv(4096)
    assert told.startswith(b"HTTP/1.1 %d " % status) and wanted in told.lower()


def test_requests_that_wait_share_a_run_and_each_gets_its_own_rows(model: Path) -> None:
    """Counted, not timed: whoever waits a whole second for others finds them."""
    alone = ht.Predictor(model)
    with serving(model, "--wait", "1000", "--max-batch", "16") as (_, port, _said), ThreadPoolExecutor(8) as pool:

        def work(n: int) -> None:
            fed = {"x": X[n : n + 1 + n % 2], "ids": np.full((1 + n % 2, 2 + n % 2), n)}
            status, told = predict(port, {name: array.tolist() for name, array in fed.items()})
            assert status == 200
            np.testing.assert_allclose(told["y"], alone.predict(fed)["y"], rtol=1e-5, atol=1e-6)

        [*pool.map(work, range(8), timeout=DEADLINE)]
        counts = json.loads(ask(port, "GET", "/health")[2])
        assert (counts["requests"], counts["rows"]) == (8, 12)
        assert counts["runs"] < 6  # two kinds, of 4 and of 8 rows, if all come in time


def test_one_bad_request_of_a_shared_run_answers_for_itself(model: Path) -> None:
    with serving(model, "--wait", "1000", "--max-batch", "3") as (_, port, _said), ThreadPoolExecutor(3) as pool:
        bad = GOOD | {"ids": [[99, 1]]}
        found = [*pool.map(lambda data: predict(port, data), (GOOD, bad, GOOD), timeout=DEADLINE)]
    assert [status for status, _ in found] == [200, 400, 200] and "index 99" in found[1][1]["error"]


def test_who_comes_when_too_many_wait_is_told_to_come_again(model: Path) -> None:
    with serving(model, "--wait", "2000", "--queue", "2") as (_, port, _said), ThreadPoolExecutor(6) as pool:
        found = [*pool.map(lambda _: predict(port, GOOD), range(6), timeout=DEADLINE)]
    answers = {status: told for status, told in found}
    assert answers.keys() == {200, 503}
    assert "2 requests wait already" in answers[503]["error"] and answers[503]["fix"] == "ask again later"


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_what_is_under_way_is_answered_before_it_ends(sent: int, code: int, model: Path) -> None:
    with serving(model, "--wait", "1500") as (process, port, _), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(predict, port, GOOD)
        while not json.loads(ask(port, "GET", "/health")[2])["waiting"]:
            pass
        process.send_signal(sent)
        assert answer.result(DEADLINE)[0] == 200
        assert process.wait(DEADLINE) == code
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1)


def test_what_the_end_cuts_short_is_told(model: Path) -> None:
    """In this process: the run is held, and the server gives the request up."""
    runs, sent = SharedRuns(ht.Predictor(model), 8, 0.0, 8), list[Any]()
    body = json.dumps(GOOD).encode()
    headers = [(b"content-type", JSON.encode()), (b"content-length", str(len(body)).encode())]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def ended() -> None:
        scope = {"path": "/predict", "method": "POST", "headers": headers}
        asked = asyncio.create_task(Service(runs, 1000)(scope, receive, send))
        while not runs.counts["runs"]:
            await asyncio.sleep(0)
        asked.cancel()
        await asked

    with runs.predictor._turn:
        asyncio.run(asyncio.wait_for(ended(), DEADLINE))
    assert sent[0]["status"] == 503 and json.loads(sent[1]["body"])["error"] == "the server ends"
    runs.thread.shutdown()


def test_beyond_this_machine_a_token_is_asked_for(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    with serving(model, "--host", "0.0.0.0", "--token", str(file)) as (_, port, said):
        assert file.stat().st_mode & 0o77 == 0 and f"$(cat {file})" in said
        token = {"authorization": f"Bearer {file.read_text()}", "host": "node7"}
        assert ask(port, "GET", "/health")[0] == 200
        assert predict(port, GOOD, **token)[0] == 200
        for wrong in ({}, {"authorization": "Bearer x"}, {"authorization": file.read_text()}):
            status, told = predict(port, GOOD, **wrong)
            assert status == 401 and told["fix"] == "send the header authorization: Bearer TOKEN"


def test_16_bit_floats_travel_bit_by_bit(tmp_path: Path) -> None:
    bf16 = pytest.importorskip("ml_dtypes").bfloat16
    x = ht.placeholder("x", (None, 3), "bfloat16")
    ht.save_model(tmp_path / "m.hetu", {"y": x * 2}, ht.Executor([x * 2]).state)
    with serving(tmp_path / "m.hetu", "--log") as (process, port, _):
        body = tensors('{"x":{"dtype":"BF16","shape":[1,3],"data_offsets":[0,6]}}', X[0].astype(bf16).tobytes())
        status, _, answer = ask(port, "POST", "/predict", body, content_type=BINARY)
        assert status == 200 and answer.endswith((X[0].astype(bf16) * 2).tobytes()) and b'"BF16"' in answer
        assert predict(port, {"x": [[1, 2, 3]]}) == (200, {"y": [[2, 4, 6]]})
        process.terminate()
        assert len(re.findall("POST /predict.* 200", process.stdout.read())) == 2


def test_what_it_prints_works_when_pasted(model: Path) -> None:
    with serving(model) as (_, port, said):
        assert f"serving  small.hetu at http://127.0.0.1:{port}\n" in said and "input    ids i64[?, ?]\n" in said
        first, second = re.search(r"try it +(.*) \| (.*)\n", said).groups()
        if subprocess.run(["which", "curl"], capture_output=True).returncode:
            pytest.skip("no curl")
        example = subprocess.run(shlex.split(first), capture_output=True, timeout=DEADLINE).stdout
        done = subprocess.run(shlex.split(second), input=example, capture_output=True, timeout=DEADLINE)
        assert [*json.loads(done.stdout)] == ["y", "log"]


NOT_SERVED: dict[str, tuple[list[str], str]] = {
    "no model": (["none.hetu"], "there is no checkpoint 'none.hetu'"),
    "beyond": (["--host", "0.0.0.0"], "0.0.0.0 is reachable by others and no token is given\n  fix: use 127.0.0.1"),
    "a port": (["--port", "70000"], "cannot listen to 127.0.0.1, port 70000"),
    "a limit": (["--max-batch", "0"], "argument --max-batch: '0' is no whole number from 1 up"),
    "no number": (["--max-body", "nan"], "argument --max-body: 'nan' is no number from 0 up"),
    "no folder": (["--token", "none/token"], "--token: [Errno 2]"),
    "an empty token": (["--token", "empty"], "empty is empty\n  fix: remove it, so that one is made"),
    "an open token": (["--token", "open"], ")\n  fix: chmod 600 open"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_SERVED)
def test_what_cannot_be_served_is_told(case: str, model: Path, tmp_path: Path) -> None:
    words, said = NOT_SERVED[case]
    (tmp_path / "open").write_text("token")
    (tmp_path / "empty").touch(0o600)
    words = words if case == "no model" else [str(model), *words]
    done = subprocess.run(
        [sys.executable, "-m", "hetu", "serve", *words], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE,
        env=os.environ | {"PYTHONPATH": f"{Path(ht.__file__).parent.parent}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert done.returncode == 2 and said in done.stderr, done.stderr
