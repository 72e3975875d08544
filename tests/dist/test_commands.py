"""Real ranks: every strategy trains every model alike, commands of the pages run, a job that is none says so."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..pairs import nightly
from ..test_readme import PAGES
from .test_launch import ROOT, heturun, under_mpiexec

DEADLINE = 300  # seconds
SMALL = {
    "examples/parallel/train.py": "--steps 3 --batch-size 12",
    "examples/ctr/train.py": "--limit 300 --epochs 1 --batch-size 48",
}


def commands() -> list[str]:
    """What the pages say after `heturun` and its number of ranks about an example, each once."""
    texts = [(ROOT / page).read_text("utf-8") for page in (*PAGES, "examples/README.md") if (ROOT / page).exists()]
    texts += [path.read_text("utf-8") for path in (ROOT / "examples").glob("*/*.py")]
    found = (re.findall(r"heturun -w \d+ ([^`\n|#]*?examples/[^`\n|#]*)", text) for text in texts)
    return sorted({line.strip() for lines in found for line in lines if any(script in line for script in SMALL)})


def every(ranks: int, *arguments: str) -> None:
    line = [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", str(ranks), "python", "-m", "tests.dist.every"]
    line += arguments
    job = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert job.returncode == 0, job.stderr
    assert len(re.findall(r"rank \d: (\d+) rows equal one process", job.stdout)) == ranks


def test_every_strategy_with_one_of_the_models_on_three_ranks() -> None:
    every(3, "float32", "6")


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_strategy(ranks: int) -> None:
    every(ranks)


@pytest.mark.nightly
def test_every_strategy_in_one_half_precision() -> None:
    every(2, "float16,bfloat16" if find_spec("ml_dtypes") else "float16", "1", "mlp", "staged")


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_every_strategy_and_model_in_half_precision(precision: str, ranks: int) -> None:
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    every(ranks, precision, "1", "mlp", "staged", "cnn", *(["transformer"] if precision == "float16" else []))


@functools.cache
def losses(*command: str) -> list[str]:
    job = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return re.findall(r"loss \d+\.\d{4}", job.stdout)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("command", commands())
def test_command_of_a_page(tmp_path: Path, command: str, ranks: int) -> None:
    """On its own number of ranks and others, with batches that do not divide, it gives what one process gives.

    On hosts that are not there it is only taken apart.
    """
    options, _, script = command.partition("python ")
    name, *given = script.split()
    dry = ["--dry-run"] if "-H " in options else []
    line = *options.split(), *dry, "python", str(ROOT / name), *given, *SMALL[name].split()
    job = heturun("-w", ranks, *line, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert job.returncode == 0, job.stderr
    if not options:
        assert re.findall(r"loss \d+\.\d{4}", job.stdout) == losses(name, *given, *SMALL[name].split())


def test_the_pages_have_commands() -> None:
    assert len(commands()) >= 8


TOLD = "this executor has neither a strategy nor a communicator: each of 2 ranks trains the whole model alone (fix:"
LONELY = """
import hetu as ht
from hetu.dist import world
{first}
x = ht.placeholder("x", (2,))
for options in {options}:
    ht.Executor([ht.sum(x)], **options).run({{"x": [1.0, 2.0]}})
"""


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("first", "options", "ranks", "warns"),
    [
        ("", "[{}, {}]", 2, True),
        ("world()", "[{}, {}]", 2, True),
        ("world().barrier()", "[{}]", 2, False),
        ("", "[{'comm': world()}]", 2, False),
        *nightly([("", "[{'strategy': ht.dist.DataParallel()}]", 2, False), ("", "[{}]", 1, False)]),
    ],
)
def test_an_executor_that_does_not_know_the_other_ranks_says_so_once(tmp_path, first, options, ranks, warns) -> None:
    script = tmp_path / "train.py"
    script.write_text(LONELY.format(first=first, options=options))
    job = heturun("-w", ranks, "python", script)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count(TOLD) == warns and "[rank 1]" not in job.stderr


def test_it_says_so_under_a_bare_mpiexec_and_a_single_process_loads_nothing_to_learn_that_it_is_alone(tmp_path) -> None:
    lonely = LONELY.format(first="", options="[{}, {}]").replace("from hetu.dist import world\n", "import sys\n")
    script = tmp_path / "train.py"
    script.write_text(lonely + 'print("hetu.dist" in sys.modules, "mpi4py" in sys.modules)\n')
    job = under_mpiexec(script)
    assert (job.returncode, job.stdout) == (0, "True False\n" * 2), job.stderr
    assert job.stderr.count(TOLD) == 1
    line, paths = [sys.executable, "-W", "error", script], os.environ | {"PYTHONPATH": str(ROOT)}
    job = subprocess.run(line, env=paths, capture_output=True, text=True, timeout=DEADLINE)
    assert (job.stdout, job.stderr) == ("False False\n", "")
