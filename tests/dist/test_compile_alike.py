"""Ranks compute by compiled code if all compile the same, else all by NumPy: real ranks, one of which is set apart."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..pairs import in_turn

ROOT = Path(__file__).parents[2]
DEADLINE = 100  # seconds
SCRIPT = """
import os, warnings, numpy as np, hetu as ht
from hetu.core.kernels import kernels
from hetu.dist import DataParallel, world
library = kernels("cpu").compiled
def fail_at(word):
    warnings.simplefilter("ignore")
    load = library.CSource.load
    def loaded_or_not(source):
        if word in source.text:
            raise OSError("no space left")
        load(source)
    library.CSource.load = loaded_or_not
if world().rank == 1:
    apart
x, w = ht.placeholder("x", (4, 1, 6, 6)), ht.variable("w", np.ones(9, "f"))
loss = ht.mean(ht.reshape(ht.max_pool2d(x, 2), (4, 9)) * w)
ex = ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)], strategy=strategy, comm=world())
images = np.arange(144).reshape(4, 1, 6, 6).astype("f")
losses = [float(ex.run({x: images})[0]) for _ in range(3)]
calls = ex.program({x: images}).calls
print("in C" if any(type(call).__name__ == "CTable" for call in calls) else "by NumPy", losses)
"""
KINDS = {
    "nobody": ("pass", "in C", ""),
    "no compiler": ("os.environ['HETU_CC'] = '0'", "by NumPy", "ranks [1] compile nothing (fix: set HETU_CC"),
    "no kernels": ("os.environ['HETU_KERNELS'] = '0'", "by NumPy", "ranks [1] compile nothing (fix: set HETU_CC"),
    "another version": ("library.digest = lambda: b'another.'", "by NumPy", "different versions of hetu (fix: install"),
}
CASES = in_turn(4, KINDS, ["DataParallel()", "None"])
# Later than at the start, ranks agree where they bind the same programs at the same time.
KINDS["a text that fails"] = ("fail_at('max_pool')", "by NumPy", "one could not compile what others can (fix: see its")


@pytest.mark.sampled(3)
@pytest.mark.compiled
@pytest.mark.parametrize(("kind", "strategy"), [*CASES, ("a text that fails", "DataParallel()")])
def test_all_ranks_compute_one_way(tmp_path: Path, kind: str, strategy: str) -> None:
    apart, way, warned = KINDS[kind]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("apart", apart).replace("strategy=strategy", f"strategy={strategy}"))
    line = [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", "2", "python", str(script)]
    job = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    assert job.returncode == 0, job.stderr
    ways = [line.split(" [")[0].split("] ")[-1] for line in job.stdout.splitlines()]
    losses = re.findall(r"\[[-\d., ]+\]$", job.stdout, re.M)
    assert ways == [way, way] and len(losses) == 2 and losses[0] == losses[1], job.stdout
    assert job.stderr.count("RuntimeWarning") == bool(warned) and warned in job.stderr
