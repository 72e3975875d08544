"""`hetu plan`: what is computed from a plan against formulas, what is written, and what is said of wrong models."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

import hetu as ht
from hetu import cli
from hetu.core.errors import ArgumentError
from hetu.dist import Parallel, rehearse
from hetu.plan import Plan
from hetu.plan.forecast import forecast, gpt, read_model

from .test_clusters import GOOD

SIZES = {"layers": 1, "features": 32, "heads": 2, "vocabulary": 64, "length": 8}
BOX = GOOD.replace("devices = 4", "devices = 2").replace("[inner]", "memory = 1e9\nflops32 = 1e11\n[inner]")
DENSE = """
import hetu as ht
x, t = ht.placeholder("x", (None, 16)), ht.placeholder("t", (None, 4))
loss = ht.mean((ht.nn.Linear(16, 4, name="forecast")(x) - t) ** 2)
entries = [loss, ht.optim.SGD(0.1).minimize(loss)]
"""


@pytest.fixture
def box(tmp_path):
    return boxed(tmp_path, BOX)


def boxed(folder, text):
    (folder / "box.toml").write_text(text)
    return ht.plan.cluster(folder / "box.toml")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("layers", "features", "vocabulary", "length"),
    [(1, 128, 512, 32), (2, 128, 512, 32), (2, 64, 2048, 128), (0, 64, 4096, 8)],
)
def test_operations_of_a_gpt_are_those_of_the_formula(layers, features, vocabulary, length, recompute):
    """For a token 6 by each weight of products, and 12 x layers x features x length in attention (PaLM, app. B)."""
    sizes = {"layers": layers, "features": features, "vocabulary": vocabulary, "length": length}
    model = gpt(**sizes, heads=2, recompute=recompute)
    weights = 12 * layers * features**2 + vocabulary * features
    formula = 16 * length * (6 * weights + 12 * layers * features * length)
    assert formula <= model.operations(16) <= 1.04 * formula  # and what is done to single numbers, once each


def test_tensor_parallel_ranks_share_the_vocabulary_of_every_gpt():
    for _ in range(2):  # the second of a process has other names
        sub = gpt(**SIZES).sub
        strategy = Parallel(tensor=2).build(sub.written.outputs, 2)
        tables = [v for v in sub.variables if 64 in v.shape]
        assert {strategy.store(v).local_shape(v.shape, 0) for v in tables} == {(32, 32)}


def test_in_float32_there_is_a_tenth_of_operations(tmp_path):
    model, one = gpt(**SIZES), boxed(tmp_path, BOX.replace("devices = 2", "devices = 1"))
    wide, narrow = (forecast(model, one, 4, precision=precision).utilization for precision in ("float32", "float16"))
    assert wide > 2 * narrow


def test_figures_follow_from_the_step(box):
    model = gpt(**SIZES)
    found = forecast(model, box, 4, precision="float16")
    best, text = found.plan.why().best, str(found)
    assert found.counted == 4 * 8
    assert found.utilization == pytest.approx(model.operations(4) / (best.seconds * 2 * 1e12))
    assert found.dollars == pytest.approx(1e6 / 32 * best.seconds * 2 * 2 / 3600)
    other = found.plan.why().next_best[0]
    rows = [
        rf"plan +{best.name}\n",
        r"degrees +(stages \d, )?data \d, tensor \d",
        rf"step +{1e3 * best.seconds:,.3f} ms\n",
        rf"utilization +{100 * found.utilization:.3g} %\n",
        rf"memory of a device +\d.* kB, {100 * best.peak / 1e9:.3g} % of 1 GB\n",
        rf"tokens per second +{32 / best.seconds:,.0f}\n",
        rf"a million tokens +\${found.dollars:.4g}\n",
        r"sent in a step +\d",
        r" step +of a device  runners-up\n",
        rf" *{1e3 * other.seconds:,.3f} ms +\+.* % .*  {re.escape(other.name)}\n",
        r"decided by time",
        rf"{len(found.plan.why().rated)} plans looked at in \d",
    ]
    for row in rows:
        assert re.search(row, text), row


def planned(tmp_path, *arguments, model="dense.py", text=DENSE):
    (tmp_path / "box.toml").write_text(BOX)
    (tmp_path / model).write_text(text)
    return cli.main(["plan", str(tmp_path / model), "--cluster", f"{tmp_path / 'box.toml'}", *arguments])


def test_the_command_prints_a_forecast_and_writes_what_runs(tmp_path, capsys):
    files = "--json", f"{tmp_path / 'plan.json'}", "--svg", f"{tmp_path / 'step.svg'}"
    assert planned(tmp_path, "--batch", "32", "--price", "0", *files) == 0
    out = capsys.readouterr().out
    assert "dense.py on 1 x box: 32 samples a step, float32\n" in out
    assert re.search(r"samples per second +[\d,]+\n", out) and re.search(r"a million samples +\$0\n", out)
    picture = ElementTree.parse(tmp_path / "step.svg").getroot()
    assert {"rank 0", "rank 1"} <= {text.strip() for text in picture.itertext()}
    entries = read_model(tmp_path / "dense.py").entries
    name = next(v.name for v in entries[1] if v.attrs["trainable"]).partition("/")[0]  # numbered, as it is read again
    written = (tmp_path / "plan.json").read_text("utf-8")
    plan = Plan.from_json(re.sub(r'"forecast(_\d+)?/', f'"{name}/', written))
    assert re.search(rf"plan +{re.escape(plan.name)}\n", out)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((32, 16), "float32"), "t": rng.standard_normal((32, 4), "float32")}
    losses = [rehearse(entries, way, feeds, world_size=n, steps=3).losses for way, n in ((None, 1), (plan, 2))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_file_may_import_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_forecast.py").write_text(DENSE)
    (tmp_path / "model.py").write_text("from beside_forecast import entries")
    assert [*read_model(tmp_path / "model.py").sub.placeholders] == ["x", "t"]


def test_a_bar_is_shown_while_it_searches(box, capsys):
    ht.plan.auto(batch_size=4, profile=ht.plan.MachineProfile.of(box)).choose(
        gpt(**SIZES).entries, world_size=1, progress=True
    )
    assert re.search(r"plans .*100%.* (\d+)/\1 ", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "1e-9"], "no plan fits"),
        (["--budget", "0"], "budget"),
        (["--batch", "0"], "batch_size=0"),
        (["--price", "-1"], "price=-1"),
        (["--svg", "nowhere/step.svg"], "folder 'nowhere' does not exist"),
        (["--cluster", "dgx"], "no cluster 'dgx'"),
    ],
)
def test_a_wrong_argument_ends_with_a_remedy(tmp_path, capsys, arguments, said):
    assert planned(tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("hetu plan: ") and said in error and "\n  fix: " in error


LINES = "\n".join(f"{name} = {value}" for name, value in {"kind": '"gpt"', **SIZES}.items())
WRONG = {
    "a size of another name": ("m.toml", LINES.replace("layers", "depth"), "m.toml: takes no 'depth'", "layers"),
    "a size is missing": ("m.toml", LINES.replace("heads = 2", ""), "m.toml: misses heads", "heads = ..."),
    "a negative size": ("m.toml", LINES.replace("32", "-32"), "m.toml: got features=-32", "1 at least"),
    "half a layer": ("m.toml", LINES.replace("= 1", "= 1.5"), "m.toml: got layers=1.5", "whole number"),
    "too many layers": ("m.toml", LINES.replace("= 1", "= 10_001"), "m.toml: got layers=10001", "10000"),
    "heads that do not divide": ("m.toml", LINES.replace("= 2", "= 3"), "m.toml: .*3", ""),
    "another kind": ("m.toml", LINES.replace("gpt", "gtp"), "m.toml: got kind='gtp'", "did you mean 'gpt'?"),
    "a kind of numbers": ("m.toml", LINES.replace('"gpt"', "[1]"), r"m.toml: got kind=\[1\]", "gpt"),
    "no kind": ("m.toml", "layers = 1", "m.toml: got kind=None", "known names: gpt"),
    "no TOML": ("m.toml", "layers", "m.toml is no TOML", "write it as"),
    "no entries": ("m.py", "loss = 1", "m.py: it makes no entries", "entries = [loss, update]"),
    "entries that are a dictionary": ("m.py", DENSE + "entries = {'train': entries}", "m.py: .* is a dict", "a list"),
    "no batch": ("m.py", DENSE.replace("None", "3"), "m.py: nothing .* has a batch", "(None, 10)"),
    "an error of hetu": ("m.py", DENSE.replace("(None, 4)", "(None, 5)"), r"m.py: .*(\n.*)*at m.py:4\n.*- t", ""),
    "no file": ("m.py", None, "no file '.*m.py'", ".toml"),
    "no file of sizes": ("m.toml", None, "m.toml: No such file", ".toml"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "message", "fix"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_model_is_told_where_and_what_works(tmp_path, name, text, message, fix):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError, match=message) as caught:
        read_model(tmp_path / name)
    assert fix in caught.value.fix
