"""A rank takes the GPU of its number on its host, unless told otherwise; on the stand-in for CuPy."""

from __future__ import annotations

import pytest

from hetu.core.backend import Device
from hetu.dist import local_rank, run_ranks
from hetu.dist.comm import process

from ..gpu import fake_cupy
from .test_launch import heturun


def test_ranks_of_a_host_take_its_gpus_in_turn():
    found = heturun("-w", 3, "python", "-m", "tests.dist.gpus")
    assert found.returncode == 0, found.stderr
    lines = sorted(line.partition("] ")[2] for line in found.stdout.splitlines() if "] rank " in line)
    assert lines == [f"rank {r}: {r} {r} gpu:{r % 2} gpu:1 cpu gpu:{r % 2}" for r in range(3)]


@pytest.mark.parametrize(
    ("variables", "rank", "gpu"),
    [
        ({}, 0, 0),
        ({"PMI_SIZE": "8", "MPI_LOCALRANKID": "5"}, 5, 1),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "4"}, 4, 0),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3"}, 3, 3),
        ({"PMI_SIZE": "8"}, 0, 0),  # a launcher that does not tell
    ],
)
def test_before_ranks_have_met_their_launcher_tells(variables, rank, gpu, monkeypatch):
    for name in (*process.LOCAL_VARIABLES, "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with fake_cupy.installed() as cupy:
        monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 4)
        assert (local_rank(), Device.parse("gpu").index) == (rank, gpu)
        assert Device.parse("gpu:2").index == 2


def test_ranks_that_are_threads_share_a_gpu():
    with fake_cupy.installed():
        assert run_ranks(2, lambda comm: Device.parse("gpu").index) == [0, 0]
