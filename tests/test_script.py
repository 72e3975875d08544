"""What training scripts share: options that mean something, a strategy by its name, a run that is taken up again."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.core.placement import STRATEGY
from hetu.ps.wire.environment import ADDRESSES
from hetu.script import Script, _spread
from hetu.script_servers import ServerOptions

from .dist.test_launch import heturun

RNG = np.random.default_rng(0)
DATA = ht.data.ArrayDataset(RNG.standard_normal((40, 3)).astype("float32"), RNG.integers(0, 2, 40), names=("x", "t"))


def script(*arguments: str) -> Script:
    made = Script("Tell two clouds apart: `python clouds.py`.\n\nMore.", epochs=2, batch_size=8, learning_rate=0.1)
    made.parse(arguments)
    return made


def run(script: Script) -> tuple[ht.Executor, ht.History]:
    x, t = ht.placeholder("x", (None, 3)), ht.placeholder("t", (None,), "int64")
    with ht.scope("script"):
        loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(3, 2)(x), t))
        batches = script.batches(script.first(DATA))
        executor = script.executor({"train": [loss, ht.optim.SGD(script.rate(batches)).minimize(loss)]})
    return executor, script.fit(executor, batches, inputs=(x, t))


def test_help_shows_the_first_sentence_and_every_option(capsys):
    with pytest.raises(SystemExit):
        script("--help")
    shown = capsys.readouterr().out
    assert "Tell two clouds apart\n" in shown and "More" not in shown
    options = "epochs batch-size learning-rate accumulate limit seed checkpoint log device precision strategy"
    assert all(f"--{option} " in shown for option in options.split())


def test_options_say_how_it_is_trained(capsys):
    executor, history = run(script("--epochs", "3", "--seed", "5", "--limit", "24", "--precision", "float16"))
    assert history.epochs == 3 and executor.state.seed == 5
    assert executor.subgraphs["train"].updates and "epoch" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script("--strategy", "nobody")


def test_batches_of_an_update_are_one_that_is_as_large():
    found, wanted = run(script("--accumulate", "2")), run(script("--batch-size", "16"))
    np.testing.assert_allclose(found[1]["loss"], wanted[1]["loss"], rtol=1e-5)
    for variable in wanted[0].variables:
        np.testing.assert_allclose(found[0].state[variable.name], wanted[0].state[variable.name], rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.sampled(3)
@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize(("strategy", "servers"), [("dp", 0), ("ps", 1), ("hybrid", 1)])
def test_ranks_and_servers_take_batches_together_as_one_process_does(strategy, servers):
    processes = ["-w", 2, *(["-s", servers] if servers else [])]
    job = heturun(*processes, "python", "-m", "tests.test_script", "--strategy", strategy, "--accumulate", "2")
    assert job.returncode == 0, job.stderr
    executor, _ = run(script("--batch-size", "16"))
    found = json.loads(job.stdout.splitlines()[-1].removeprefix("[rank 0] "))
    for name, values in found.items():
        np.testing.assert_allclose(values, executor.state[name], rtol=1e-5)
    assert len(found) == 2


def tables(*arguments: str) -> tuple[Script, np.ndarray]:
    """A script whose table servers may keep, and what it says of each row in the end."""
    made = Script(__doc__, epochs=2, batch_size=8, learning_rate=0.1)
    servers = ServerOptions(made, {"*table*": 1.0}, rate=0.3, cache="lru")
    made.parse(arguments)
    ids, t = ht.placeholder("ids", (None,), "int64"), ht.placeholder("t", (None,), "int64")
    with ht.scope("tables"):
        y = ht.nn.Linear(3, 2)(ht.nn.Embedding(9, 3, name="table")(ids))
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    batches = made.batches(ht.data.ArrayDataset(np.arange(40) ** 2 % 9, DATA.arrays[1]))
    graphs = {"train": [loss, servers.updates(loss, batches)], "eval": [y]}
    executor = made.executor(graphs, servers.strategy())
    history = made.fit(executor, batches, inputs=(ids, t))
    if servers.take_part:
        made.say(servers.report(executor, history, 10, {ids: np.zeros(8, int), t: np.zeros(8, int)}))
    return made, executor.run("eval", {"ids": np.arange(9)})[0]


@pytest.mark.usefixtures("meaning")
def test_tables_learn_by_batches_that_count_as_one():
    """Their gradients were lost, and the last batch alone moved them; with these no server can have the table."""
    job = heturun("-w", 2, "-s", 1, "python", "-m", "tests.test_script", "tables", "--accumulate", "2")
    assert job.returncode == 0 and "hybrid" in job.stdout, job.stderr
    found = json.loads(job.stdout.splitlines()[-1].removeprefix("[rank 0] "))
    for arguments in (["--accumulate", "2"], ["--batch-size", "16"]):
        np.testing.assert_allclose(found, tables(*arguments)[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", ["--epochs", "--batch-size", "--limit", "--accumulate"])
@pytest.mark.parametrize("value", ["0", "-5", "1.5", "all"])
def test_a_number_that_means_nothing_is_told_by_its_option(option, value, capsys):
    """A limit of 0 took all samples, no epochs ended in the rule of a rate."""
    with pytest.raises(SystemExit):
        script(option, value)
    assert f"argument {option}: {value!r} is no whole number from 1 up" in capsys.readouterr().err


def test_a_seed_counts_from_0(capsys):
    assert script("--seed", "0").options.seed == 0
    with pytest.raises(SystemExit):
        script("--seed", "-1")
    assert "argument --seed: '-1' is no whole number from 0 up" in capsys.readouterr().err


def test_fewer_samples_than_a_batch_are_one_batch():
    made = script("--limit", "5")
    assert [len(x) for x, _ in made.batches(made.first(DATA))] == [5]


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    path = str(tmp_path / "run")
    run(script("--epochs", "1", "--checkpoint", path))
    _, history = run(script("--epochs", "3", "--checkpoint", path))
    assert history.epochs == 3 and len(history["loss"]) == 3


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, None),
        ({"PMI_SIZE": "2"}, "dp"),
        ({"PMI_SIZE": "2", ADDRESSES: "tcp://127.0.0.1:1"}, "hybrid"),
        ({"PMI_SIZE": "2", STRATEGY: "zero3"}, "zero3"),
    ],
)
def test_what_a_job_has_names_the_strategy(environment, wanted, monkeypatch):
    for name in (STRATEGY, ADDRESSES, "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setitem(os.environ, name, value)
    assert _spread() == wanted


def test_options_that_are_left_out_have_their_defaults_and_are_refused(capsys):
    made = Script("A title.", epochs=2, batch_size=5, learning_rate=0.1, without=["--accumulate", "--batch-size"])
    options = made.parse([])
    assert options.accumulate == 1 and options.batch_size == 5 and made.rate(range(3))
    with pytest.raises(SystemExit):
        made.parse(["--accumulate", "2"])
    assert "unrecognized arguments: --accumulate 2" in capsys.readouterr().err
    with pytest.raises(ArgumentError, match=r"without=\['--limits'\] are no options of all scripts"):
        Script("A title.", epochs=2, batch_size=5, learning_rate=0.1, without=["--limits"])


if __name__ == "__main__":
    if sys.argv[1] == "tables":
        made, found = tables(*sys.argv[2:])
        made.say(json.dumps(found.tolist()))
        sys.exit()
    made = script(*sys.argv[1:])
    executor, _ = run(made)
    trained = [v.name for v in executor.variables if v.attrs["trainable"]]
    made.say(json.dumps({name: executor.state[name].tolist() for name in trained}))


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--rows", "int9", "no way 'int9' for numbers to travel; did you mean 'int8'"),
        ("--values", "1bit", "values='1bit'; use float16 or int8"),
        ("--at-rest", "topk:0.1", "at_rest='topk:0.1'; use float16 or int8"),
        ("--gradients", "topk:nan", "'topk:nan'; send a share of the numbers above 0"),
        ("--consistency", "ssp:-1", "unknown consistency 'ssp:-1'; use bsp, asp, or ssp:3"),
    ],
)
def test_a_way_that_servers_do_not_know_is_told_with_its_remedy(option, text, said, capsys):
    """In one process, too, where it was passed over without a word."""
    made = Script("Fit a table.", epochs=1, batch_size=8, learning_rate=0.1)
    ServerOptions(made, {})
    with pytest.raises(SystemExit):
        made.parse([option, text])
    assert f"argument {option}: {said}" in capsys.readouterr().err
