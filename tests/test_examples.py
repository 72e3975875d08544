"""Every example: `--help`, and a small run of the real script that learns and ends with its metric line."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import string
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu.script import Script

from .dist.test_launch import heturun
from .pairs import nightly

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBER = r"\d+\.\d+"
SMALL_GPT = "--limit 4000 --length 32 --features 32 --layers 1 --sample 20 --epochs 3"
SMALL_BERT = "--limit 100 --length 16 --features 16 --layers 1 --pieces 260 --epochs 2 --labels 64"
SMALL_LSTM = "--limit 4000 --length 16 --units 16 --sample 20 --epochs 3"
CLASSES = "logistic", "svm", "fm", "bayes", "counts", "bits", "neighbors", "tree", "forest", "gbdt"  # of ml/train.py
NUMBERS = "linear", "ridge", *(f"{model}_numbers" for model in ("fm", "neighbors", "tree", "forest", "gbdt"))
GROUPS, PARTS = ("kmeans", "mixture"), ("pca", "nmf", "lda", "als")
RUNS = [
    ("cnn/train.py --model logistic --limit 100", f"logistic on mnist: test accuracy {NUMBER}%"),
    ("cnn/train.py --model mlp --limit 100 --data fashion", f"mlp on fashion: test accuracy {NUMBER}%"),
    ("cnn/train.py --limit 60 --epochs 3", f"lenet on mnist: test accuracy {NUMBER}%"),
    ("cnn/train.py --model resnet --limit 20 --epochs 2 --batch-size 25", f"resnet on mnist: test accuracy {NUMBER}%"),
    ("cnn/train.py --model vgg --limit 20 --epochs 2 --batch-size 25", f"vgg on mnist: test accuracy {NUMBER}%"),
    (
        "cnn/segment.py --limit 60 --width 4 --epochs 2 --batch-size 10",
        f"unet on fashion pixels: mean overlap {NUMBER}% of 11 classes",
    ),
    ("cnn/train.py --model vit --limit 40 --epochs 2", f"vit on mnist: test accuracy {NUMBER}%"),
    (
        "cnn/train.py --limit 200 --epochs 3 --batch-size 20 --data fashion --augment crop flip mixup",
        f"lenet on fashion: test accuracy {NUMBER}%",
    ),
    (
        "rnn/weather.py --limit 100 --length 7",
        rf"lstm on seattle weather: mean error {NUMBER} C in 365 days \(persist.*",
    ),
    (f"rnn/chars.py {SMALL_LSTM}", rf"lstm on shakespeare: {NUMBER} nats \({NUMBER} bits\) a character held out"),
    (f"nlp/gpt.py {SMALL_GPT}", f"gpt2 on shakespeare: {NUMBER} nats a character held out"),
    (f"nlp/gpt.py {SMALL_GPT} --model llama --pieces 300", f"llama on shakespeare: {NUMBER} nats a character held out"),
    *(
        (
            f"nlp/bert.py {SMALL_BERT} --tune {tune}",
            rf"bert_{tune} on shakespeare: test accuracy {NUMBER}% of plays, .*",
        )
        for tune in ("frozen", "whole", "lora")
    ),
    (
        "nlp/sounds.py --limit 500 --epochs 2 --features 16 --layers 1 --asked 10",
        rf"encoder_decoder on sounds of words: {NUMBER}% of words right by one beam, {NUMBER}% by 4",
    ),
    (
        "nlp/sounds.py --limit 500 --epochs 2 --features 16 --layers 1 --asked 10 --model recurrent",
        rf"recurrent on sounds of words: {NUMBER}% of words right by one beam, {NUMBER}% by 4",
    ),
    ("graph/train.py --epochs 20", f"gcn on wordnet nouns: test accuracy {NUMBER}%"),
    ("graph/train.py --epochs 20 --sample 5 --batch-size 50", f"graphsage on wordnet nouns: test accuracy {NUMBER}%"),
    ("graph/train.py --epochs 20 --sample 5 --model gat", f"gat on wordnet nouns: test accuracy {NUMBER}%"),
    ("graph/train.py --epochs 20 --model graphsage", f"graphsage on wordnet nouns: test accuracy {NUMBER}%"),
    ("graph/train.py --epochs 20 --model gat --limit 70", f"gat on wordnet nouns: test accuracy {NUMBER}%"),
    ("graph/parts.py --epochs 20 --features 4", f"graphsage on wordnet nouns: test accuracy {NUMBER}%"),
    ("graph/grid.py --epochs 20", f"gcn on wordnet nouns: test accuracy {NUMBER}%"),
    *(
        (
            f"knowledge/train.py --limit 600 --epochs 2 --features 8 --model {model}",
            rf"{model} on wordnet triples: MRR {NUMBER}, Hits@1 {NUMBER}, Hits@10 {NUMBER}",
        )
        for model in ("transe", "distmult", "complex", "rotate")
    ),
    *(
        (
            f"experts/train.py --limit 3000 --length 16 --features 16 --layers 1 --gate {gate}",
            f"{gate} on shakespeare: {NUMBER} nats a character held out",
        )
        for gate in ("switch", "top2", "prototypes", "hash", "balanced", "groups", "dense_to_sparse")
    ),
    ("experts/train.py --limit 100 --features 16", f"switch on shakespeare: {NUMBER} nats a character held out"),
    ("ctr/train.py --limit 1000", f"wide_deep on adult: test AUC {NUMBER}, loss {NUMBER}"),
    ("ctr/train.py --limit 1000 --model deepfm", f"deepfm on adult: test AUC {NUMBER}, loss {NUMBER}"),
    ("ctr/train.py --limit 1000 --model xdeepfm", f"xdeepfm on adult: test AUC {NUMBER}, loss {NUMBER}"),
    ("ctr/train.py --limit 1000 --model dlrm", f"dlrm on adult: test AUC {NUMBER}, loss {NUMBER}"),
    ("ctr/train.py --limit 1 --model dlrm", f"dlrm on adult: test AUC {NUMBER}, loss {NUMBER}"),
    *(
        (
            f"ctr/pairs.py --limit 3000 --model {model}",
            f"{model} on shakespeare in place of movielens: test AUC {NUMBER}",
        )
        for model in ("ncf", "deepfm")
    ),
    (
        "ctr/pairs.py --limit 3000 --model two_towers",
        f"two_towers on shakespeare in place of movielens: test item first of 100 in {NUMBER}%, among ten in .*",
    ),
    ("ctr/train.py --limit 1000 --model dcn", f"dcn on adult: test AUC {NUMBER}, loss {NUMBER}"),
]
DEEP = [
    (f"cnn/train.py --model {name} --limit 30 --epochs 2 --batch-size 10", f"{name} on mnist: test accuracy {NUMBER}%")
    for name in ("resnet34", "resnet50", "mobilenet", "densenet")
]
OTHERS = [  # that print no table of epochs
    (
        "ctr/compress.py --data adult --limit 300 --epochs 1 --methods hash int8 pep --ratios 0.3 0.01",
        rf"fm on adult: test AUC {NUMBER}, .* {NUMBER} at 0.3, .* {NUMBER} at 0.01",
    ),
    (
        "ctr/compress.py --clicks 500 --count 100 --epochs 1 --methods mde --ratios 0.5",
        rf"fm on drawn clicks: test AUC {NUMBER}, mde {NUMBER} at 0.5",
    ),
    (
        "experts/evolve.py --seeds 2 --epochs 1 --batch-size 512",
        rf"EvoMoE on tokens of four kinds: error {NUMBER} with {NUMBER} experts a token; Switch, .*, {NUMBER} .*",
    ),
    (
        "experts/evolve.py --seeds 1 --epochs 1 --batch-size 100000",
        rf"EvoMoE on tokens of four kinds: error {NUMBER} .*",
    ),
]
ESTIMATORS = [
    *((f"ml/train.py --limit 300 --model {model}", rf"{model} on mnist: test accuracy {NUMBER}%") for model in CLASSES),
    *((f"ml/train.py --limit 300 --model {model}", rf"{model} on weather: R2 {NUMBER} .*") for model in NUMBERS),
    *((f"ml/train.py --limit 300 --model {model}", rf"{model} on mnist: {NUMBER}% of .*") for model in GROUPS),
    *((f"ml/train.py --limit 300 --model {model}", rf"{model} on mnist: .* {NUMBER}% by a .*") for model in PARTS),
    ("ml/train.py --limit 300 --optimizer ftrl --epochs 2", rf"logistic on mnist: test accuracy {NUMBER}%"),
]
SCRIPTS = sorted({command.split()[0] for command, _ in RUNS + OTHERS + ESTIMATORS})


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script as Python would, in this process."""
    path, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [path, *arguments])
    with ht.scope("example"):  # counts names afresh, as a new process does
        runpy.run_path(str(EXAMPLES / path), run_name="__main__")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(f"{script} --help", monkeypatch)
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    left = (EXAMPLES / script).read_text("utf-8").partition("left = (")[2].partition(")")[0]  # what it has no use for
    wanted = {"--seed", "--epochs", "--learning-rate", "--device"} - {*left.replace('"', "").split(", ")}
    assert wanted and all(option in shown for option in wanted)


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_of_numbers_take_those_from_0_up_alone(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every such option of every script: NaN became weights, and -1 pieces, layers or steps went through."""
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, *_: sys.exit(parsers.append(self)))
    with pytest.raises(SystemExit):
        run(script, monkeypatch)
    monkeypatch.undo()
    (parser,) = parsers
    numbers = [a for a in parser._actions if a.metavar in ("N", "RATE", "SHARE", "POWER") or a.type in (int, float)]
    assert numbers
    for option in numbers:
        for text in ("nan", "-1", "inf", "many"):
            with pytest.raises(SystemExit):
                parser.parse_args([f"{option.option_strings[0]}={text}"])
            assert f"{text!r} is no " in capsys.readouterr().err
    assert "None" not in parser.format_help()


class Noting(argparse.Namespace):
    """Options of which it is noted which are read, so which may have an effect."""

    def __getattribute__(self, name: str) -> object:
        if not name.startswith("_"):
            READ.add(name)
        return super().__getattribute__(name)


READ: set[str] = set()


def parse_noting(script: Script, arguments: list[str] | None = None, parse=Script.parse) -> argparse.Namespace:
    script.options = Noting(**vars(parse(script, arguments)))
    READ.clear()
    return script.options


def each_script_first(runs: list[tuple[str, str]]) -> list[Any]:
    """Of the runs of each script the first and each sixth after it; the others, with what else it offers, nightly."""
    seen: Counter[str] = Counter()
    found = []
    for run in runs:
        found += nightly([run]) if seen[run[0].split()[0]] % 6 else [run]
        seen[run[0].split()[0]] += 1
    return found


@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize(
    ("command", "last"), [*each_script_first(RUNS), *nightly(DEEP)], ids=[command for command, _ in RUNS + DEEP]
)
def test_small_run(
    command: str, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Script, "parse", parse_noting)
    run(command, monkeypatch)
    given = {word[2:].replace("-", "_") for word in command.split() if word.startswith("--")}
    assert given <= READ, f"without effect: {given - READ}"
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(last, lines[-1])
    losses = [float(row.split()[1]) for row in lines if re.fullmatch(rf" +\d+( +{NUMBER})+", row)]
    assert losses[-1] < losses[0], losses


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize(
    ("command", "last"),
    [*OTHERS, *each_script_first(ESTIMATORS)],
    ids=[command for command, _ in OTHERS + ESTIMATORS],
)
def test_another_small_run(
    command: str, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(command, monkeypatch)
    assert re.fullmatch(last, capsys.readouterr().out.splitlines()[-1])


@pytest.mark.usefixtures("meaning")
def test_bert_begins_with_published_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[MASK]", *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)]
    ht.data.WordPieces({piece: n for n, piece in enumerate(pieces)}).save(tmp_path)
    published = ht.models.bert.BERT(len(pieces), 8, 1, 2, positions=32)
    executor = ht.Executor([published(ht.placeholder("x", (None, 32), "int64"))])
    published.publish(executor.state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2, "layer_norm_eps": 1e-12}))
    run(f"nlp/bert.py --weights {tmp_path} --tune lora --limit 40 --tune-epochs 1", monkeypatch)
    last = rf"bert_lora on shakespeare: test accuracy {NUMBER}% of plays, .*"
    assert re.fullmatch(last, capsys.readouterr().out.splitlines()[-1])


@pytest.mark.nightly
def test_experts_that_evolve_are_no_worse_than_switch_with_as_many_evaluations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """EvoMoE's claim, mean of three seeds."""
    run("experts/evolve.py", monkeypatch)
    mine, left, others = map(float, re.findall(NUMBER, capsys.readouterr().out.splitlines()[-1]))
    assert mine <= others and left <= 1.2


@pytest.mark.parametrize(
    ("limit", "batch_size", "steps"), [(8, 1, 2), (8, 4, 2), (8, 20, 1), (2, 1, 1)], ids=lambda value: str(value)
)
def test_ranks_make_as_many_steps_as_the_one_with_the_fewest_nodes_can(limit: int, batch_size: int, steps: int) -> None:
    """With few nodes, or small batches, a rank had to make more batches than it has nodes."""
    owned = runpy.run_path(str(EXAMPLES / "graph/parts.py"))["Owned"]
    part = SimpleNamespace(owners=np.array([0, 0, 0, 1, 0, 0, 0, 1]))
    assert owned.steps(part, np.arange(limit), batch_size) == steps


def test_a_model_that_is_not_sampled_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trained graphsage without a word."""
    with pytest.raises(SystemExit) as ended:
        run("graph/train.py --model gcn --sample 5", monkeypatch)
    assert ended.value.code == 2
    assert "--sample N trains graphsage or gat, not --model gcn" in capsys.readouterr().err


@pytest.mark.nightly
def test_two_towers_learn_where_each_worker_takes_a_part_of_a_batch() -> None:
    """The right one of its items was asked for by its place in the whole batch."""
    command = ["python", str(EXAMPLES / "ctr/pairs.py"), *"--model two_towers --limit 60 --epochs 1".split()]
    found = heturun("-w", 2, "-s", 1, *command, "--strategy", "ps")
    assert found.returncode == 0 and "test item first of 100" in found.stdout, found.stderr


SEVERAL = [  # what two ranks train that one process trains above
    *(f"cnn/train.py --model {model} --limit 20 --epochs 1 --batch-size 20" for model in ("logistic", "mlp", "resnet")),
    f"nlp/gpt.py {SMALL_GPT} --model llama",
    f"nlp/gpt.py {SMALL_GPT} --model llama --strategy tp",
    f"nlp/bert.py {SMALL_BERT} --tune frozen",
    f"nlp/bert.py {SMALL_BERT} --tune lora",
    *(f"graph/train.py --epochs 2 --sample 5 --batch-size 70 --model {model}" for model in ("graphsage", "gat")),
    *(
        f"experts/train.py --limit 1000 --length 16 --features 16 --layers 1 --epochs 1 --strategy ep --gate {gate}"
        for gate in ("switch", "top2", "prototypes", "hash", "balanced", "groups", "dense_to_sparse")
    ),
    "ctr/pairs.py --limit 600 --epochs 1 --model deepfm",
    "ctr/pairs.py --limit 600 --epochs 1 --model two_towers",
]


@pytest.mark.nightly
@pytest.mark.parametrize("command", SEVERAL)
def test_two_ranks_reach_what_one_process_does(command: str) -> None:
    path, *options = command.split()
    servers = ("-s", 1) if path.startswith("ctr") else ()
    script = ["python", str(EXAMPLES / path), *options]
    alone, found = heturun("-w", 1, *script), heturun("-w", 2, *servers, *script)
    assert found.returncode == 0 == alone.returncode, found.stderr + alone.stderr
    (loss, *_), (wanted, *_) = (  # of the first epoch
        [float(row[1]) for row in re.findall(rf"^(?:\[rank 0\])? +(\d+) +({NUMBER})", run.stdout, re.M)]
        for run in (found, alone)
    )
    assert loss == pytest.approx(wanted, rel=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "command", ["ctr/train.py --limit 300", *nightly([["knowledge/train.py --limit 100 --features 4"]])]
)
def test_a_run_that_is_over_is_taken_up_on_ranks_and_says_the_same(command: str, tmp_path: Path) -> None:
    """Its report compiles a step that nobody has made: on one rank alone, it waited for the others."""
    script, *options = command.split()
    asked = ["python", str(EXAMPLES / script), *options, "--epochs", "1", "--checkpoint", str(tmp_path / "saved")]
    first, second = (heturun("-w", 2, "-s", 1, *asked) for _ in range(2))
    assert first.returncode == second.returncode == 0, second.stderr
    assert first.stdout.splitlines()[-1] == second.stdout.splitlines()[-1]


def test_every_estimator_is_a_model_of_an_example() -> None:
    models = runpy.run_path(str(EXAMPLES / "ml/train.py"))["MODELS"]
    assert {*models} == {*CLASSES, *NUMBERS, *GROUPS, *PARTS}
    assert {name for name, _ in models.values()} == {*ht.ml.ESTIMATORS}


@pytest.mark.nightly
@pytest.mark.parametrize("options", ["--model svm", *nightly([["--model svm --optimizer sgd --strategy ps"]])])
def test_estimators_fit_on_workers_and_servers(options: str) -> None:
    script = ["python", str(EXAMPLES / "ml/train.py"), "--limit", "200", *options.split()]
    found = heturun("-w", 2, "-s", 1, *script)
    assert found.returncode == 0 and found.stdout.count("svm on mnist: test accuracy") == 1, found.stderr
    assert "Warning" not in found.stderr


def test_every_script_is_tested_and_in_the_table() -> None:
    families = {script.split("/")[0] for script in SCRIPTS}
    assert {p.relative_to(EXAMPLES).as_posix() for f in families for p in (EXAMPLES / f).glob("*.py")} == {*SCRIPTS}
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"examples/{script}" in text for script in SCRIPTS)


def test_films_that_are_damaged_are_told_and_words_do_not_stand_in_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "movielens").mkdir()
    for name in ("ratings.dat", "users.dat", "movies.dat"):
        (tmp_path / "movielens" / name).write_text("1::2\n")
    monkeypatch.setenv("HETU_DATA", str(tmp_path))
    with pytest.raises(ht.errors.DataError, match="movies.dat, row 1: 2 fields, expected 3"):
        run("ctr/pairs.py --limit 60 --epochs 1", monkeypatch)


def test_the_list_of_examples_is_that_of_the_readme() -> None:
    found = runpy.run_path(str(EXAMPLES / "__main__.py"))
    results = {c: found["Result"](*kept) for c, kept in json.loads((EXAMPLES / "results.json").read_text()).items()}
    assert found["tables"](results) in (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert found["strategy"]("heturun -w 2 -s 1 python examples/ctr/train.py --strategy ps") == "ps, 2 ranks, 1 server"
    assert found["strategy"]("python examples/cnn/train.py") == "one process"


def test_a_run_continues_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"cnn/train.py --model logistic --limit 100 --checkpoint {tmp_path / 'run'}"
    run(command, monkeypatch)
    first = capsys.readouterr().out
    run(command, monkeypatch)
    assert capsys.readouterr().out == first  # nothing was left to do, not even the times changed


LOOKED_AFTER = {  # what of a script does as an option says
    **dict.fromkeys(("--accumulate", "--checkpoint", "--log"), ("script.fit(",)),
    "--strategy": ("script.executor(", "strategy=options.strategy"),
    "--precision": ("script.executor(", "options.precision"),
    "--limit": ("script.first(", "options.limit"),
    "--batch-size": ("script.batches(", "options.batch_size"),
}


@pytest.mark.parametrize("path", [p for p in EXAMPLES.glob("*/*.py") if " Script(" in p.read_text("utf-8")])
def test_an_option_that_a_script_does_not_look_after_is_refused(path, monkeypatch, capsys):
    text = path.read_text("utf-8")
    for option, means in LOOKED_AFTER.items():
        if not any(each in text for each in means):
            monkeypatch.setattr(sys, "argv", [str(path), option, "1"])
            with pytest.raises(SystemExit):
                runpy.run_path(str(path), run_name="__main__")
            assert f"unrecognized arguments: {option} 1" in capsys.readouterr().err


WITHOUT_EFFECT = [
    ("ml/train.py --model ridge --optimizer sgd", "--optimizer has no effect with --model ridge"),
    ("ml/train.py --epochs 3", "--epochs has no effect with --optimizer None"),
    ("nlp/gpt.py --model llama --dropout 0.1", "--dropout has no effect with --model llama: it needs --model gpt2"),
    ("nlp/bert.py --weights there --pieces 9", "--pieces has no effect with --weights there: leave out --weights"),
    ("nlp/bert.py --weights there --features 9", "--features has no effect with --weights there"),
    ("nlp/bert.py --weights there --layers 9", "--layers has no effect with --weights there"),
    ("nlp/bert.py --weights there --epochs 9", "--epochs has no effect with --weights there"),
    ("experts/train.py --gate hash --balance 0.1", "--balance has no effect with --gate hash: it needs --gate switch"),
    ("experts/train.py --gate balanced --balance 0.1", "--balance has no effect with --gate balanced"),
]


@pytest.mark.parametrize(("command", "said"), WITHOUT_EFFECT)
def test_an_option_without_effect_is_refused(command, said, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(command, monkeypatch)
    assert said in capsys.readouterr().err
