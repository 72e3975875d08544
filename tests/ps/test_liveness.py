"""Real processes that compute for long, freeze, or die: who keeps its place, and who takes over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetu.checkpoint import MANIFEST
from hetu.dist import launch
from hetu.ps import SSP, ServerProcess
from hetu.ps.messages import Kind, Message, encode

from ..dist.test_launch import DEADLINE, ROOT, descendants
from .network import TOKEN, connect, options
from .simulation import new_store
from .test_messages import TOKEN as SECRET
from .test_messages import guarded
from .test_snapshot import saved

WORKER = """
import sys, numpy as np
from hetu.ps import Client, Parameter
address, token = sys.stdin.readline().rstrip().split('|')
with Client([address], 1, token, retry=0.1) as client:
    print("here", flush=True)
    sys.stdin.readline()
    client.clock().wait()
    print("back", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
def test_a_worker_that_computes_keeps_its_place_and_one_that_is_frozen_loses_it():
    lease = 1.0
    with (
        ServerProcess(options("bsp", 2, lease=lease)) as server,
        subprocess.Popen([sys.executable, "-c", WORKER], stdin=-1, stdout=-1, text=True) as worker,
        connect([server.address], retry=0.1) as client,
    ):
        worker.stdin.write(f"{server.address}|{TOKEN}\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "here\n"
        tick, begin = client.clock(), client.status()[0]["seconds"]
        while (status := client.status()[0])["seconds"] < begin + 2 * lease:
            assert status["clocks"] == {"0": 1, "1": 0} and status["silent"]["1"] < lease
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "back\n"
        tick.wait()
        worker.send_signal(signal.SIGSTOP)
        try:
            client.clock().wait()
            assert client.status()[0]["clocks"] == {"0": 2}
        finally:
            worker.send_signal(signal.SIGCONT)


def test_signs_of_life_count_for_one_life_of_one_worker_and_need_the_token():
    sessions = guarded()

    def silence(**meta: object) -> float:
        for worker in (0, 99):
            sessions.receive(b"heart", encode(Message(Kind.PING, worker=worker, meta=meta)), now=5.0)
        return 5.0 - sessions.store.members[0].last_seen

    assert silence(token="guess", incarnation=100) == silence(token=SECRET, incarnation=7) == silence(token=SECRET) == 5
    assert silence(token=SECRET, incarnation=100) == 0


def test_a_new_worker_waits_until_those_of_the_life_before_the_restart_are_back(tmp_path):
    later = saved(new_store(3, SSP(1)), tmp_path)

    def greet(worker: int, incarnation: int, **meta: int) -> list[int]:
        meta = {"incarnation": incarnation, "first": 1, "at": 0, **meta}
        step = meta["at"]
        return [r.meta["clock"] for r in later.handle(Message(Kind.HELLO, worker=worker, step=step, meta=meta), 0.0)]

    assert greet(1, 200) == []
    assert greet(0, 100, first=9, at=5) == [5] and greet(1, 200) == []
    assert greet(2, 100, first=9, at=4) == [4]
    assert greet(1, 200) == [4] and later.clocks.of == {0: 5, 2: 4, 1: 4}


TRAIN = """
import os, signal, sys, time, warnings
from pathlib import Path
import numpy as np
from hetu.ps import Parameter
from hetu.ps.environment import connect, place
warnings.simplefilter("ignore")
client, (rank, _), go = connect(), place(), Path(sys.argv[1])
client.create({"w": Parameter((1,), rule="add", reduce="sum")}, {"w": np.zeros(1)})
for step in range(60):
    while step == 20 and not go.exists():
        time.sleep(0.01)
    client.push("w", np.ones(1, "f"))
    if step == 30 and rank == 0:
        os.kill(int(go.read_text()), signal.SIGKILL)
    client.clock().wait()
if rank == 0:
    print(int(client.pull("w").wait()[0]), client.status()[0]["restored"]["clock"])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_heturun_starts_a_killed_server_again_from_its_snapshot_and_training_ends_well(tmp_path):
    script, go, kept = tmp_path / "train.py", tmp_path / "go", tmp_path / "kept" / "server-0"
    script.write_text(TRAIN)
    line = [sys.executable, "-m", "hetu.dist.launch", "-w", "2", "-s", "1", "--snapshots", str(kept.parent)]
    line += ["--snapshot-every", "0.1", "python", str(script), str(go)]
    job = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + DEADLINE
        while not (kept / MANIFEST).exists() or json.loads((kept / MANIFEST).read_text())["extra"]["slowest"] < 20:
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        [server] = [p for p in descendants(job.pid) if b"hetu.ps.server" in Path(f"/proc/{p}/cmdline").read_bytes()]
        (tmp_path / "pid").write_text(str(server))
        os.replace(tmp_path / "pid", go)
        out, err = job.communicate(timeout=DEADLINE)
    finally:
        job.kill()
    assert job.returncode == 0, err
    said = [line for line in err.splitlines() if line.startswith("heturun")]
    assert said == [f"heturun: server 0 was killed by SIGKILL and runs again, from its snapshot in {kept}"]
    total, clock = map(int, out.removeprefix("[rank 0] ").split())
    assert 20 <= clock <= 31 and 2 * (60 - (31 - clock)) <= total <= 2 * 60


def test_snapshots_need_servers_and_a_folder(tmp_path, capsys):
    (tmp_path / "file").touch()
    wrong = {
        "--snapshots x without a server\n  fix: add -s 1": ["--snapshots", "x"],
        "--snapshot-every 3 without a folder\n  fix: add --snapshots DIR": ["-s", "1", "--snapshot-every", "3"],
        "File exists\n  fix: name a folder": ["-s", "1", "--snapshots", str(tmp_path / "file")],
    }
    for text, arguments in wrong.items():
        with pytest.raises(SystemExit):
            launch.main([*arguments, "python", "train.py"])
        assert text in capsys.readouterr().err
