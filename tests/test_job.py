"""How many cores a process may use, in folders that say it as Linux does to processes of containers."""

import math
from pathlib import Path

import pytest

from hetu.cpu_kernels import openblas
from hetu.job import cores, share

V2, V1, FREEZER = "0::{}\n", "4:cpuset:/\n2:cpu,cpuacct:{}\n", "3:freezer:{}\n"
OLD = ("cpu/{}cpu.cfs_quota_us", "cpu/{}cpu.cfs_period_us")


@pytest.mark.parametrize(
    "own,files,wanted",
    [
        (V2.format("/"), {"cpu.max": "150000 100000"}, 1.5),
        (V2.format("/"), {"cpu.max": "max 100000"}, math.inf),
        (V2.format("/a/b"), {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),  # of a group above
        (V2.format("/a"), {"a/cpu.max": "50000 100000", "a/b/cpu.max": "1 100000"}, 0.5),  # one below is not its own
        (V2.format("/host/x"), {"cpu.max": "200000 100000"}, 2.0),  # only its own group is seen, as the first
        (V1.format("/"), {OLD[0].format(""): "300000", OLD[1].format(""): "100000"}, 3.0),
        (V1.format("/a"), {OLD[0].format("a/"): "-1", OLD[1].format("a/"): "100000"}, math.inf),
        (V1.format("/a:b"), {OLD[0].format("a:b/"): "25000", OLD[1].format("a:b/"): "100000"}, 0.25),
        ("3:cpuacct,cpu:/\n", {OLD[0].format(""): "300000", OLD[1].format(""): "100000"}, 3.0),
        (FREEZER.format("/"), {"freezer/cpu.max": "1 1"}, math.inf),
        (V2.format("/"), {"cpu.max": "nonsense"}, math.inf),
        (V2.format("/"), {}, math.inf),
        (None, {"cpu.max": "1 1"}, math.inf),
        ("nonsense\n", {"cpu.max": "1 1"}, math.inf),
        ("0::/\udcff\n", {"cpu.max": "1 1"}, math.inf),
    ],
)
def test_the_time_that_control_groups_leave(
    tmp_path: Path, own: str | None, files: dict[str, str], wanted: float
) -> None:
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    if own is not None:
        (tmp_path / "own").write_text(own, errors="surrogateescape")
    assert share(tmp_path / "groups", tmp_path / "own") == wanted


@pytest.mark.parametrize("least,wanted", [(0.25, 1), (1.0, 1), (1.5, 2), (math.inf, cores())])
def test_a_part_of_a_core_is_one(monkeypatch: pytest.MonkeyPatch, least: float, wanted: int) -> None:
    monkeypatch.setattr("hetu.job.share", lambda: least)
    assert cores() == min(wanted, cores())


def test_blas_has_no_more_threads_than_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = openblas.get_threads()
    if before is None:
        pytest.skip("NumPy has another library")
    monkeypatch.setattr(openblas, "cores", lambda: 1)
    openblas.set_threads(2)
    openblas.fit()
    try:
        assert openblas.get_threads() == 1
    finally:
        openblas.set_threads(before)
