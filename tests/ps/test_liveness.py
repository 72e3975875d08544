"""Real processes that compute for long, freeze, or die: who keeps its place, and who takes over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hetu.checkpoint import generations
from hetu.core.errors import ArgumentError
from hetu.dist.launch import heturun as launch
from hetu.ps import SSP, ServerError, ServerProcess, ServerTimeoutError
from hetu.ps.store.messages import Kind, Message
from hetu.ps.wire.handshake import sign_of_life

from ..dist.test_launch import DEADLINE, ROOT, descendants, heturun
from ..pairs import nightly
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
    lease = 2.0
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
            time.sleep(0.01)  # or both would ask and answer without end
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


def test_a_server_that_is_gone_keeps_nobody_for_long():
    with ServerProcess(options("bsp", 1)) as server, connect([server.address], retry=0.1, silence=1.0) as client:
        client.ping()
        server.process.kill()
        server.process.wait()
        for leave in (client.leave, client.ping):
            with pytest.raises(ServerTimeoutError, match=r"no sign of life from tcp://\S+ in 1 s") as caught:
                leave()
        assert "heturun --silence S" in str(caught.value)


def test_a_server_that_waits_for_others_gives_signs_of_life():
    silence = 2.0
    with (
        ServerProcess(options("bsp", 2)) as server,
        connect([server.address], 0, retry=0.1, silence=silence) as first,
        connect([server.address], 1, retry=0.1) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        second.ping()
        begin, waits = second.status()[0]["seconds"], pool.submit(lambda: first.clock().wait())
        while second.status()[0]["seconds"] < begin + 2 * silence:
            assert not waits.done()
            time.sleep(0.01)
        second.clock().wait()
        waits.result(timeout=DEADLINE)


def test_how_long_a_server_may_be_silent_or_take_is_a_variable(monkeypatch):
    monkeypatch.setenv("HETU_ARRIVE", "0.001")
    with pytest.raises(ServerError, match=r"not ready after 0.001 s"):
        ServerProcess(options("asp", 1))
    monkeypatch.setenv("HETU_ARRIVE", "60")
    with ServerProcess(options("asp", 1)) as server:
        monkeypatch.setenv("HETU_DEADLINE", "7")
        with connect([server.address], timeout=None) as client:
            assert client.transport.timeout == 70
        monkeypatch.setenv("HETU_SILENCE", "7.5")
        with connect([server.address]) as client:
            assert client.transport.silence == 7.5
        monkeypatch.setenv("HETU_SILENCE", "soon")
        with pytest.raises(ArgumentError, match="HETU_SILENCE is 'soon'"):
            connect([server.address])


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
def test_a_server_that_was_frozen_holds_nobodys_silence_against_them():
    lease = 1.0
    with (
        ServerProcess(options("bsp", 2, lease=lease)) as server,
        connect([server.address], 0, retry=0.1) as first,
        connect([server.address], 1, retry=0.1) as second,
    ):
        first.ping()
        second.ping()
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(2 * lease)  # while the hearts of both go on beating
        first.clock()
        server.process.send_signal(signal.SIGCONT)
        assert first.status()[0]["clocks"] == {"0": 1, "1": 0}
        second.clock().wait()


def test_signs_of_life_count_for_one_life_of_one_worker_and_need_the_token():
    sessions = guarded()

    def silence(token: str, life: int) -> float:
        for worker in (0, 99):
            sessions.receive(b"heart", sign_of_life(token, worker, life), now=5.0)
        return 5.0 - sessions.store.members[0].last_seen

    assert silence("guess", 100) == silence(SECRET, 7) == 5
    sessions.owner = lambda frame: 1
    assert silence(SECRET, 100) == 5  # by the key of another
    sessions.owner = None
    assert silence(SECRET, 100) == 0


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
import json, sys, time, warnings
from pathlib import Path
import numpy as np
from hetu.ps import Parameter
from hetu.ps.wire.environment import connect, place
warnings.simplefilter("ignore")
client, (rank, _), folder, steps = connect(), place(), Path(sys.argv[1]), int(sys.argv[2])
names = ["w", "v"][: len(client.transport.links)]
client.create({n: Parameter((1,), rule="add", reduce="sum") for n in names}, dict.fromkeys(names, np.zeros(1)))
while client.step < steps:
    if client.step == 30 and rank == 0:
        client.clock(snapshot=True).wait()
        (folder / "here").touch()
        continue
    while client.step == 31 and not (folder / "go").exists():
        time.sleep(0.01)
    for name in names:
        client.push(name, np.ones(1, "f"))
    client.clock().wait()
if rank == 0:
    values = [client.pull(name).wait()[0] for name in names]
    print(json.dumps([*map(float, values), *(status["restored"]["clock"] for status in client.status())]))
"""


class Launched:
    """Training under heturun that waits for `kill` after clock 30 has been kept, and what came of it."""

    def __init__(self, folder: Path, servers: int, steps: int = 60) -> None:
        self.folder, self.kept = folder, folder / "kept"
        (folder / "train.py").write_text(TRAIN)
        line = [
            sys.executable,
            "-m",
            "hetu.dist.launch.heturun",
            "-w",
            "2",
            "-s",
            str(servers),
            "--snapshots",
            str(self.kept),
        ]
        line += ["--snapshot-every", "0.1", "python", str(folder / "train.py"), str(folder), str(steps)]
        self.job = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait(self) -> list[int]:
        """The servers, by their process ids, once training waits."""
        deadline = time.monotonic() + DEADLINE
        while not (self.folder / "here").exists():
            assert self.job.poll() is None and time.monotonic() < deadline, self.job.communicate(timeout=1)[1]
            time.sleep(0.02)
        started = descendants(self.job.pid)
        return [p for p in started if b"hetu.ps.wire.server" in Path(f"/proc/{p}/cmdline").read_bytes()]

    def end(self) -> tuple[list[float], list[str]]:
        """What rank 0 printed, and what heturun said."""
        (self.folder / "go").touch()
        try:
            out, err = self.job.communicate(timeout=DEADLINE)
        finally:
            self.job.kill()
        assert self.job.returncode == 0, err
        said = [line for line in err.splitlines() if line.startswith("heturun")]
        return json.loads(out.removeprefix("[rank 0] ")), said


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_heturun_starts_a_killed_server_again_from_its_snapshot_and_training_ends_well(tmp_path):
    launched = Launched(tmp_path, servers=1)
    [server] = launched.wait()
    os.kill(server, signal.SIGKILL)
    found, said = launched.end()
    text = "heturun: server 0 was killed by SIGKILL and runs again, from its snapshot of clock 31 in"
    assert said == [f"{text} {launched.kept}/server-0-of-1"]
    assert found == [60 + 59, 31]


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_servers_that_are_killed_at_once_go_on_from_a_clock_that_all_have_kept(tmp_path):
    """So does a whole job that is started again, on more servers. One of them has a snapshot that the other has not."""
    launched = Launched(tmp_path, servers=2)
    servers = launched.wait()
    for server in servers:
        os.kill(server, signal.SIGSTOP)
    kept = launched.kept / "server-1-of-2"
    newest = max(generations(kept))
    assert newest == 31
    shutil.copytree(kept / str(newest), kept / str(newest + 5))
    for server in servers:
        os.kill(server, signal.SIGKILL)
    found, said = launched.end()
    assert len(said) == 2 and all(f"from its snapshot of clock {newest} in" in line for line in said)
    assert found == [60 + 59] * 2 + [newest] * 2
    kept = [generations(launched.kept / f"server-{n}-of-2") for n in range(2)]
    common = max({*kept[0]} & {*kept[1]})
    (tmp_path / "here").unlink()
    found, said = Launched(tmp_path, servers=3, steps=80).end()
    assert said == [] and found == [60 + 59 + 2 * (80 - 60)] * 2 + [common] * 3


FIT = """
import json, sys
import numpy as np
import hetu as ht
from hetu.ps.wire.environment import place
from hetu.strategies import ParameterServer
x = np.arange(8.0, dtype="float32") / 8
node, target = ht.placeholder("x", (None,)), ht.placeholder("t", (None,))
w = ht.variable("w", 0.0, ())
loss = ht.mean((target - w * node) * (target - w * node))
ex = ht.Executor({"train": [loss, ht.optim.SGD(0.2).minimize(loss)], "eval": [loss]}, strategy=ParameterServer())
sign = -1 if place()[0] == int(sys.argv[1]) else 1  # what this worker sees gets worse
history = ht.fit(ex, [(x, x)] * 4, epochs=6, inputs=[node, target], validate=("eval", [(x, sign * x)]), patience=2)
history.columns.pop("seconds")
print(json.dumps(history.columns))
"""


@pytest.mark.parametrize(("mode", "worse", "epochs"), [("bsp", 0, 3), *nightly([("bsp", 1, 6), ("asp", 1, None)])])
def test_all_workers_stop_early_after_the_same_epoch(mode, worse, epochs, tmp_path):
    """Under BSP by the numbers of worker 0, under ASP by those of whoever is first."""
    script = tmp_path / "train.py"
    script.write_text(FIT)
    job = heturun("-w", 2, "-s", 1, "--consistency", mode, "python", script, worse)
    assert job.returncode == 0, job.stderr
    first, second = (json.loads(line.partition("] ")[2]) for line in sorted(job.stdout.splitlines()))
    assert first == second and len(first["loss"]) == (epochs or len(first["loss"]))


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
