"""Partial reduce while real processes are killed: its server, which goes on, or a rank, and another job goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ..dist.test_launch import ROOT, descendants

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
DEADLINE, EPOCHS, BATCHES = 120, 20, 4
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
import hetu as ht
from hetu.dist import world
from hetu.strategies import PartialReduce

folder, struck, epochs, rank, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), world().rank, 0
rng = np.random.default_rng(0)
X = rng.standard_normal((48, 6)).astype("f")
T = X @ rng.standard_normal(6).astype("f")
x, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None,))
w = ht.variable("w", np.zeros(6, "f"))
loss = ht.mean((ht.sum(x * w, axis=1) - t) ** 2)
executor = ht.Executor({"train": [loss, ht.optim.Momentum(0.02).minimize(loss)]}, strategy=PartialReduce(2))
loader, run = ht.data.DataLoader(ht.data.ArrayDataset(X, T), 12, seed=1), executor.run

def running(*given, **more):
    global steps
    steps += 1
    if (rank, steps) == (1, 24) and struck == "rank":
        os.kill(os.getpid(), signal.SIGKILL)
    if struck == "server" and (rank, steps) in ((1, 8), (2, 18)):
        (folder / f"at-{steps}").touch()  # whoever waits for partners now does so before and after
        until = time.monotonic() + 60
        while not (folder / f"done-{steps}").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
    return run(*given, **more)

executor.run = running
options = {"epochs": epochs, "inputs": ["x", "t"], "checkpoint": folder / "saved.npz", "resume": True}
history = ht.fit(executor, loader, progress=False, **options)
print(json.dumps([history["loss"], steps, executor.state["w"].tolist()]), flush=True)
"""


class Trained:
    """A job of three ranks with two servers, the second of which keeps nothing."""

    def __init__(self, folder: Path, struck: str) -> None:
        (folder / "train.py").write_text(SCRIPT)
        line = [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", "3", "-s", "2"]
        line += ["--snapshots", str(folder / "kept"), "python", str(folder / "train.py"), str(folder), struck]
        pipe = subprocess.PIPE
        self.folder, self.job = (
            folder,
            subprocess.Popen([*line, str(EPOCHS)], cwd=ROOT, stdout=pipe, stderr=pipe, text=True),
        )

    def kill_servers(self, step: int, which: slice = slice(None), *, again: bool = False) -> None:
        """Once a rank is at this step; if `again`, one that runs again is killed before it is ready."""
        until = time.monotonic() + DEADLINE
        while not (self.folder / f"at-{step}").exists():
            assert self.job.poll() is None and time.monotonic() < until, self.job.communicate(timeout=1)
            time.sleep(0.01)
        servers = self.servers()
        assert len(servers) == 2
        for server in servers[which]:
            os.kill(server, signal.SIGKILL)
        if again:
            while not (new := [server for server in self.servers() if server not in servers]):
                assert self.job.poll() is None and time.monotonic() < until
                time.sleep(0.01)
            os.kill(new[0], signal.SIGKILL)
        (self.folder / f"done-{step}").touch()

    def servers(self) -> list[int]:
        found = []
        for process in descendants(self.job.pid):
            with suppress(OSError):  # it has just ended
                if b"hetu.ps.wire.server" in Path(f"/proc/{process}/cmdline").read_bytes():
                    found.append(process)
        return sorted(found)

    def end(self):
        """The exit code, what each rank told, and what was said on standard error."""
        try:
            out, err = self.job.communicate(timeout=DEADLINE)
        finally:
            self.job.kill()
        code, lines = self.job.returncode, sorted(out.splitlines())
        return code, [json.loads(line.partition("] ")[2]) for line in lines if not code], err


def test_servers_that_are_killed_together_and_one_alone_go_on_and_so_do_all_ranks(tmp_path):
    trained = Trained(tmp_path, "server")
    trained.kill_servers(8, again=True)
    trained.kill_servers(18, slice(1), again=True)
    code, found, err = trained.end()
    assert code == 0 and err.count("was killed by SIGKILL and runs again, from its record of groups in") == 3, err
    assert len({json.dumps(row[0]) for row in found}) == 1 and {len(row[0]) for row in found} == {EPOCHS}
    assert found[0][0][-1] < 0.1 * found[0][0][0]
    assert len({json.dumps(row[2]) for row in found}) == 1  # the last checkpoint has averaged all


@pytest.mark.nightly
def test_a_job_whose_rank_is_killed_ends_and_the_next_goes_on_from_its_checkpoint(tmp_path):
    code, _, err = Trained(tmp_path, "rank").end()
    assert code != 0 and "rank 1" in err and (tmp_path / "saved.npz").exists()
    code, found, err = Trained(tmp_path, "nobody").end()
    assert code == 0, err
    assert {len(row[0]) for row in found} == {EPOCHS}
    assert max(row[1] for row in found) < EPOCHS * BATCHES - 8  # two epochs at least had been kept
    assert found[0][0][-1] < 0.1 * found[0][0][0]
