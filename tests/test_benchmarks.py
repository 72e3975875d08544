"""The CPU benchmark: every row builds and makes a step, its statistics are right, and all ways of hetu train alike.

Ignored on purpose: times, and the sides of other libraries, which are checked by their results whenever it runs.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import hetu as ht

from .pairs import in_turn

BENCHMARKS = Path(__file__).parent.parent / "examples" / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    names = "automl", "hot_rows", "peer_hetu", "recipes", "rows", "sampling", "standings", "start"
    automl, hot_rows, peer_hetu, recipes, rows, sampling, standings, start = map(importlib.import_module, names)
README = ("tiny_mlp", "mlp_sgd", "mlp_adam", "lenet", "resnet", "lstm", "gpt", "gpt_256", "wide_deep", "gcn")


def first(variant: str, threads: int) -> dict:
    """What a peer that trains the tiny MLP reports before it is timed."""
    peer = sampling.Peer("hetu", variant, "tiny_mlp", threads)
    try:
        assert peer.title == "hetu"
        assert peer.run(2)["cpu"] > 0
        return peer.first
    finally:
        peer.close()


def test_a_peer_chooses_its_kernels_itself(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Nehalem")
    assert "for Nehalem" not in first("default", 1)["versions"]["numpy BLAS"]


def test_halves_of_a_batch_on_two_threads_train_as_the_whole():
    whole, halves = (first(variant, 2)["results"] for variant in ("default", "split"))
    assert len(whole) == 4
    np.testing.assert_allclose(halves, whole, rtol=1e-5)


def test_what_checkpoints_cost_is_measured_of_three_ways():
    sizes = "--width", "16", "--layers", "1", "--steps", "2", "--rounds", "2"
    line = [sys.executable, str(BENCHMARKS / "checkpoints.py"), *sizes]
    shown = subprocess.run(line, capture_output=True, text=True, check=True, timeout=120).stdout
    rows = [row.split()[0] for row in shown.splitlines() if row]
    assert rows[-4:] == ["written", "none", "meanwhile", "before"], shown


TRAINING = [name for name, row in rows.WORKLOADS.items() if row.trains]
INFERENCE = [name for name in rows.WORKLOADS if name not in TRAINING]


@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("name", [*TRAINING, *in_turn(3, INFERENCE)])
@pytest.mark.sampled(8)
def test_a_row_makes_a_step_at_a_small_size(name):
    workload = rows.WORKLOADS[name].shrunk()
    with ht.scope(name):
        step = peer_hetu.make(workload, "default")
        made = [step() for _ in workload.batches()]
    assert all(np.isfinite(result).all() for result in made)
    assert all(np.size(result) == 1 for result in made) == workload.trains


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block", start.BLOCKS)
def test_stacks_have_about_as_many_nodes_as_wanted(block):
    row = start.stack(start.BLOCKS[block], 200, rounds=1)
    assert 120 < row["nodes"] < 300 and row["instructions"] < row["nodes"]


def test_rows_are_many_and_of_every_kind():
    workloads = rows.WORKLOADS.values()
    assert len(workloads) >= 60 and set(README) <= rows.WORKLOADS.keys()
    summaries = [workload.summary for workload in workloads]
    assert len(set(summaries)) == len(summaries)
    for family in rows.FAMILIES:
        own = [workload for workload in workloads if workload.family == family]
        assert {workload.trains for workload in own} == {True, False}, family
    assert {workload.does for workload in workloads} == {"SGD", "Adam", "inference"}
    assert sum(isinstance(workload.batch, tuple) for workload in workloads) >= 3
    assert sum(workload.batch == 1 and not workload.kind.fixed for workload in workloads) >= 8


@pytest.mark.parametrize("peer", sorted(BENCHMARKS.glob("peer_[!d]*.py")), ids=lambda path: path.stem)
def test_a_library_brings_every_word_of_the_models(peer):
    text, models = peer.read_text("utf-8"), (BENCHMARKS / "networks.py").read_text("utf-8")
    words = set(re.findall(r"\bf\.(\w+)\(", models)) | {"gelu", "lstm", "gru"}
    assert len(words) > 20
    missing = {
        word for word in words if not re.search(rf"def {word}\(|^    (.*[ .])?{word}\b.* = ", text, re.MULTILINE)
    }
    assert not missing


def row(name: str, hetu: list[float], family: str = "mlp", valid: bool = True, **others: list[float]) -> dict:
    seconds = {"hetu": hetu} | {title.replace("_", ", "): taken for title, taken in others.items()}
    same = dict.fromkeys(seconds, 1e6)
    return {"workload": name, "family": family, "threads": 1, "summary": name, "valid": valid, "errors": [],
            "seconds": seconds, "start": same, "peak": same}  # fmt: skip


MEASURED = [
    row("won", [1.0, 2.0, 3.0], torch=[9.0, 9.0, 9.0], torch_best=[2.0, 4.0, 12.0], jax=[0.1, 0.1, 0.1]),
    row("lost", [2.0, 2.0], torch=[1.0, 1.0], torch_best=[4.0, 4.0]),
    row("differs", [1.0], family="cnn", valid=False, torch=[9.0]),
    row("alone", [1.0], family="cnn"),
]


def test_a_ratio_is_the_median_of_paired_rounds_against_the_fastest_variant_of_torch():
    assert [standings.standing(measured) for measured in MEASURED] == [0.5, 2.0, None, None]
    assert standings.best_of_torch(MEASURED[1]) == "torch"


def test_the_summary_counts_rows_won_void_and_by_family():
    lines = standings.summary(MEASURED).splitlines()
    assert lines[2:5] == [
        "| all | 4 | 1 | 2 | 1.00 | 2.00 (lost) |",
        "| mlp | 2 | 1 | 0 | 1.00 | 2.00 (lost) |",
        "| cnn | 2 | 0 | 2 | - | - |",
    ]
    assert lines[-2] == "Geometric means against torch 0.67; torch, best 0.50; jax 20.00."
    assert lines[-1] == "Slowest against PyTorch: lost (mlp) 2.00; won (mlp) 0.50."
    shown = standings.table(MEASURED).splitlines()
    assert len(shown) == 2 + len(MEASURED) and "void: results differ" in shown[4]


def test_results_of_two_processors_are_kept_side_by_side(tmp_path):
    standings.save({"processor": "Intel Xeon"}, MEASURED[:1], tmp_path)
    standings.save({"processor": "AMD EPYC"}, MEASURED[:1], tmp_path)
    standings.save({"processor": "AMD EPYC"}, [row("won", [3.0], torch=[1.0]), MEASURED[1]], tmp_path)
    assert len(json.loads((tmp_path / "cpu_amd_epyc.json").read_text())["rows"]) == 2
    assert standings.side_by_side(tmp_path).splitlines() == [
        "| row | threads | AMD EPYC | Intel Xeon |",
        "|---|---|---|---|",
        "| won | 1 | 3.00 | 0.50 |",
        "| lost | 1 | 2.00 | - |",
        "| geometric mean | | 2.45 | 0.50 |",
    ]


@pytest.mark.nightly
@pytest.mark.compiled
def test_what_a_recipe_gains_is_printed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["recipes.py", "fed", "masks", "fuse_attention", "--rounds", "2"])
    monkeypatch.setattr(recipes.openblas, "set_threads", lambda count: None)
    recipes.main()
    shown = capsys.readouterr().out
    assert all(re.search(rf"^{name} +\d+\.\d+ \(", shown, re.M) for name in ("fed", "masks", "fuse_attention"))


def test_estimators_are_shown_beside_scikit_learns(monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="the extra [dev] is not installed")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    ml = importlib.import_module("ml")
    few = dict.fromkeys(["GaussianNB", "MultinomialNB"], lambda: ml.documents(60, 20, 3, 10))
    monkeypatch.setattr(ml, "CASES", {name: replace(ml.CASES[name], data=data) for name, data in few.items()})
    monkeypatch.setattr("sys.argv", ["ml.py", "--rounds", "2"])
    monkeypatch.setattr(ml.openblas, "set_threads", lambda count: None)
    ml.main()
    shown = re.findall(r"^(\w+) +60 x 20 +\d+\.\d+ \(.* (\S+) +(\S+)$", capsys.readouterr().out, re.M)
    assert [name for name, *_ in shown] == [*few] and all(ours == theirs for _, ours, theirs in shown)


def fewest(batches: list[frozenset[int]], lines: int) -> int:
    """Rows pulled by the best of all ways to keep up to `lines` rows after each batch, each of them tried."""

    @cache
    def from_here(turn: int, held: frozenset[int]) -> int:
        if turn == len(batches):
            return 0
        known = held | batches[turn]
        kept = combinations(sorted(known), min(lines, len(known)))
        return len(batches[turn] - held) + min(from_here(turn + 1, frozenset(rows)) for rows in kept)

    return from_here(0, frozenset())


@pytest.mark.parametrize("seed", range(8))
def test_no_cache_pulls_fewer_rows_than_the_one_that_is_called_best(seed):
    rng = np.random.default_rng(seed)
    batches = [np.unique(rng.integers(0, 7, rng.integers(1, 4))) for _ in range(9)]
    for lines in (1, 2, 3):
        best = hot_rows.fewest_pulled(batches, lines)
        assert best == fewest([frozenset(batch.tolist()) for batch in batches], lines)
    assert hot_rows.fewest_pulled(batches, 7) == len(np.unique(np.concatenate(batches)))


def test_searches_are_measured_beside_chance():
    rows = {row["sampler"]: row for row in automl.on_branin(2)}
    assert {*rows} == {"random", "windows", "gaussian", "forest"} and rows["gaussian"]["at most 0.05"] == "2 of 2"
    (row,) = automl.by_asha(1, least=1, most=3, trials=4)
    assert row["epochs"] == 12 and 0 < float(row["ASHA"]) <= 1
    assert {*automl.tables()} == {"adult", "mnist", "weather"}
