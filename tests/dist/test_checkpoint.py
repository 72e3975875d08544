"""Checkpoints of a model on several ranks: bit-equal under another strategy and number of ranks, all or nothing."""

from __future__ import annotations

import json
import shutil
import tracemalloc

import numpy as np
import pytest

import hetu as ht
from hetu.checkpoint import MANIFEST, Checkpoint, begin, ids_name, manifest, write_atomically, write_part
from hetu.core.errors import CheckpointError
from hetu.core.placement import Alone
from hetu.dist import Pipeline, run_ranks
from hetu.dist.cut.builders import DataParallel, Parallel, TensorParallel, ZeRO
from hetu.dist.cut.heterogeneous import Heterogeneous

from .models import MODELS
from .test_strategies import SPLIT

WAYS = {
    "alone": (None, 1),
    "data": (DataParallel, 2),
    "zero1": (lambda: ZeRO(1), 3),
    "zero3": (lambda: ZeRO(3), 4),
    "tensor": (lambda: TensorParallel(SPLIT), 2),
    "zero x tensor": (lambda: Parallel(tensor=2, zero=3, split=SPLIT), 4),
    "pipeline": (lambda: Pipeline(data=2), 4),
    "unequal": (lambda: Heterogeneous([(0, 1), (2,)], (2, 1), split=SPLIT), 3),
}


def on(way, act, model="transformer"):
    """`act(executor, feeds)` on every rank."""
    strategy, ranks = WAYS[way]

    def run(comm):
        graph, feeds = MODELS[model]()
        kwargs = {"strategy": strategy(), "comm": comm} if strategy else {}
        return act(ht.Executor(graph, **kwargs), feeds)

    return run_ranks(ranks, run) if strategy else [run(None)]


def parts(ex, feeds=None):
    """Global box -> value of each variable that this rank keeps."""
    found = {}
    for node in ex.variables:
        box = tuple((0, s) for s in node.shape)
        if not isinstance(ex.placement, Alone):
            piece = ex.placement.strategy.store(node).pieces(node.shape).get(ex.placement.comm.rank)
            if piece is None:
                continue
            box = piece.box
        found[node.name] = box, ex.state[node.name]
    return found


def whole(ranks):
    """The variables of a model, put together from the parts of its ranks."""
    found = {}
    for name in sorted({name for rank in ranks for name in rank}):
        pieces = [rank[name] for rank in ranks if name in rank]
        out = np.zeros(
            [max(highs) for highs in zip(*([high for _, high in box] for box, _ in pieces))], pieces[0][1].dtype
        )
        for box, value in pieces:
            out[tuple(slice(low, high) for low, high in box)] = value
        found[name] = out
    return found


def save_after_two_steps(path):
    def act(ex, feeds):
        for feed in feeds[:2]:
            ex.run("train", feed)
        ex.save(path, {"step": 2})
        return parts(ex)

    return act


def load(path):
    def act(ex, feeds):
        assert ex.load(path) == {"step": 2}
        return parts(ex)

    return act


@pytest.mark.parametrize(
    ("written", "read"),
    [("zero3", "tensor"), ("tensor", "zero1"), ("zero x tensor", "alone"), ("alone", "zero3"), ("unequal", "data"),
     ("zero1", "unequal"), ("data", "zero x tensor"), ("pipeline", "zero3"), ("tensor", "pipeline")],
)  # fmt: skip
@pytest.mark.sampled(16)
def test_another_strategy_reads_the_same_bits(tmp_path, written, read):
    path = tmp_path / "model"
    before = whole(on(written, save_after_two_steps(path)))
    after = whole(on(read, load(path)))
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name], err_msg=name)


def test_training_goes_on_as_if_never_stopped(tmp_path):
    path = tmp_path / "model"

    def later(ex, feeds):
        return [float(ex.run("train", feed)[0]) for feed in feeds[2:5]]

    unbroken = on("data", lambda ex, feeds: [save_after_two_steps(path)(ex, feeds), later(ex, feeds)][1])[0]
    resumed = on("zero1", lambda ex, feeds: [load(path)(ex, feeds), later(ex, feeds)][1])[0]
    np.testing.assert_allclose(resumed, unbroken, atol=1e-6)


def test_each_rank_writes_its_part_and_no_value_is_written_twice(tmp_path):
    path = tmp_path / "model"
    on("data", save_after_two_steps(path), model="mlp")
    on("data", save_after_two_steps(path), model="mlp")  # over the first
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json", "save2-part0.safetensors", "save2-part1.safetensors",
    ]  # fmt: skip
    manifest = json.loads((path / "manifest.json").read_text())
    assert {part for entry in manifest["variables"].values() for part, _ in entry["pieces"]} == {0, 1}
    assert all(len(entry["pieces"]) == 1 for entry in manifest["variables"].values())


@pytest.fixture(scope="module")
def saved(tmp_path_factory, meaning):
    """A checkpoint of four ranks."""
    path = tmp_path_factory.mktemp("saved") / "model"
    on("zero3", save_after_two_steps(path), model="mlp")
    return path


HELD = {  # a manifest of two variables, of which one is a table without a bound, and where what is ours ends
    "format": "hetu-parts-1", "save": 1, "bytes": [0, 0], "extra": {},
    "variables": {
        "w": {"shape": [4, 3], "dtype": "float32", "pieces": [[0, [[0, 2], [0, 3]]], [1, [[2, 4], [0, 3]]]]},
        "t": {"shape": [9, 3], "dtype": "float32", "pieces": [], "parts": [1], "ids": "t"},
    },
}  # fmt: skip
WRONG = (None, True, "?", 1.5, -1, 7, [], {}, [[]], {"?": 1})


def places_in(told, path=()):
    """Where something stands in what JSON holds."""
    for key in [*told] if isinstance(told, dict) else range(len(told)) if isinstance(told, list) else ():
        yield (*path, key)
        yield from places_in(told[key], (*path, key))


@pytest.mark.parametrize("place", [*places_in(HELD)], ids=lambda place: ".".join(map(str, place)))
def test_whatever_a_manifest_lacks_is_told_with_its_file_and_what_to_do(tmp_path, place):
    """Each thing in it is taken out, and put in the place of each another; what is read then is right or an error."""
    values, sizes = np.arange(12, dtype="f").reshape(4, 3), []
    for part in range(2):
        rows = {ids_name("t"): np.arange(2), "t": values[:2]} if part else {}
        sizes.append(write_part(tmp_path, 1, part, {"w": values[2 * part : 2 * part + 2], **rows}))
    (tmp_path / MANIFEST).write_bytes(manifest(1, sizes, HELD["variables"], {}))
    whole = (tmp_path / MANIFEST).read_text()
    gone, told = object(), 0
    for wrong in (gone, *WRONG):
        changed = inside = json.loads(whole)
        for key in place[:-1]:
            inside = inside[key]
        if wrong is gone:
            del inside[place[-1]]
        else:
            inside[place[-1]] = wrong
        (tmp_path / MANIFEST).write_text(json.dumps(changed))
        try:
            found = Checkpoint(tmp_path)
            if {"w", "t"} <= found.variables.keys():
                np.testing.assert_array_equal(found.read("w", ((0, 4), (0, 3))), values)
                found.check_rows(["t"])
                for ids, [rows] in found.rows(["t"]):  # a table may have none
                    np.testing.assert_array_equal(rows[ids], values[:2])
        except CheckpointError as error:
            told += 1
            assert str(tmp_path) in error.message or "-part" in error.message
            assert error.fix
    assert told >= len(WRONG) - 1 or place in (
        ("extra",),
        ("variables", "w", "shape", 0),
        ("variables", "t", "shape", 0),
    )


def damaged(path, damage):
    file = path / "save1-part1.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "garbage":
        file.write_bytes(bytes(file.stat().st_size))
    elif damage == "no manifest":
        (path / "manifest.json").unlink()
    else:
        (path / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "said"),
    [("missing", "lacks its part save1-part1"), ("truncated", "it was written with"), ("garbage", "not a whole"),
     ("no manifest", "no save was finished"), ("broken manifest", "no manifest of a checkpoint")],
)  # fmt: skip
@pytest.mark.parametrize("way", ["alone", "tensor"])
def test_a_damaged_checkpoint_changes_nothing_on_any_rank(tmp_path, saved, damage, said, way):
    path = tmp_path / "model"
    shutil.copytree(saved, path)
    damaged(path, damage)

    def act(ex, feeds):
        before = {name: ex.state[name] for name in ex.state}
        with pytest.raises(CheckpointError) as caught:
            ex.load(path)
        for name, value in before.items():
            np.testing.assert_array_equal(ex.state[name], value)
        return str(caught.value)

    assert all(said in text for text in on(way, act, model="mlp"))


def test_one_rank_that_cannot_write_leaves_the_old_checkpoint_whole(tmp_path):
    path = tmp_path / "model"
    before = whole(on("data", save_after_two_steps(path), model="mlp"))
    (path / ".save2-part1.safetensors.part").mkdir()  # where rank 1 would write

    def act(ex, feeds):
        ex.run("train", feeds[0])
        with pytest.raises(CheckpointError, match="cannot be written"):
            ex.save(path)

    on("data", act, model="mlp")
    after = whole(on("alone", load(path), model="mlp"))
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])


def test_what_a_killed_save_has_left_goes_before_the_next_which_has_another_number(tmp_path):
    """A host that still sees a part of the killed one must not take it for one of the next."""
    on("data", save_after_two_steps(tmp_path), model="mlp")
    for name in ("save2-part1.safetensors", ".save2-part0.safetensors.part", "manifest.ready"):
        (tmp_path / name).write_text("left")
    (tmp_path / "save2-part0.txt").write_text("the user's")
    assert begin(tmp_path) == 3
    there = {f"save1-part{part}.safetensors" for part in range(2)} | {"manifest.json", "save2-part0.txt"}
    assert {path.name for path in tmp_path.iterdir()} == there


def test_another_model(tmp_path):
    path = tmp_path / "model"
    on("data", save_after_two_steps(path), model="mlp")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        on("data", load(path), model="cnn")


def test_where_a_file_is_no_folder_can_be_made(tmp_path):
    path = tmp_path / "model"
    on("alone", save_after_two_steps(path), model="mlp")
    with pytest.raises(CheckpointError, match="is a file, ranks save to a folder"):
        on("data", save_after_two_steps(path), model="mlp")


def test_one_process_goes_on_in_the_folder_of_ranks_and_ranks_after_it(tmp_path):
    path = tmp_path / "model"
    on("zero x tensor", save_after_two_steps(path), model="mlp")
    before = whole(
        on("alone", lambda ex, feeds: [load(path)(ex, feeds), save_after_two_steps(path)(ex, feeds)][1], model="mlp")
    )
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "save2-part0.safetensors"]
    for read in ("alone", "data"):
        after = whole(on(read, load(path), model="mlp"))
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / ".model.part").mkdir()  # where the file is written first
    with pytest.raises(CheckpointError, match="model' cannot be written: Is a directory(?s:.*)save to a file of yours"):
        on("alone", save_after_two_steps(tmp_path / "model"), model="mlp")


def test_of_a_file_only_what_is_asked_for_is_read_and_all_of_one_save(tmp_path):
    """All of a file, and all parts that were read, stayed in memory as long as the checkpoint."""
    path = tmp_path / "model"
    write_atomically(path, {name: np.full((1000, 100), k, "float32") for k, name in enumerate("ab")}, {})
    tracemalloc.start()
    opened = Checkpoint(path)
    for low in range(0, 1000, 10):
        rows = opened.read("b", ((low, low + 10), (50, 100)))
    assert (rows.shape, rows.max()) == ((10, 50), 1) and tracemalloc.get_traced_memory()[1] < 300_000
    tracemalloc.stop()
    write_atomically(path, {"a": np.full((1000, 100), 7, "float32")}, {})
    assert opened.read("a", ((0, 1000), (0, 100))).max() == 0 and "b" not in Checkpoint(path).variables
