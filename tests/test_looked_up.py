"""A step changes the rows of a table that were looked up and no others, whatever happens to gradients on the way.

Every optimizer, precision and clipping, in one process and on ranks. The oracle is a table of nothing but the rows that
are looked up, each in every step: no update of it can be lazy.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import hetu as ht
from hetu.core.memory import types_of
from hetu.dist import DataParallel, ZeRO, run_ranks
from hetu.passes import PASSES

from .samples.update import stranger

ROWS, WIDTH = 40, 3
SEEN = np.array([3, 4, 11, 25, 39])  # the rows that are looked up
DENSE = [name for name in PASSES if name not in ("sparsify_updates", "fuse_groups")]


class Stranger(ht.optim.Optimizer):
    rule = stranger


OPTIMIZERS = {
    "sgd": lambda **given: ht.optim.SGD(0.1, **given),
    "rates": lambda **given: ht.optim.SGD(ht.schedules.cosine(0.5, 40), **given),
    "momentum": lambda **given: ht.optim.Momentum(0.1, 0.5, **given),
    "nesterov": lambda **given: ht.optim.Momentum(0.1, 0.5, nesterov=True, **given),
    "adagrad": lambda **given: ht.optim.AdaGrad(0.1, **given),
    "rmsprop": lambda **given: ht.optim.RMSProp(0.01, **given),
    "adam": lambda **given: ht.optim.Adam(0.01, **given),
    "adamw": lambda **given: ht.optim.AdamW(0.01, weight_decay=0.5, **given),
    "amsgrad": lambda **given: ht.optim.AMSGrad(0.01, **given),
    "lion": lambda **given: ht.optim.Lion(0.01, weight_decay=0.5, **given),
    "ftrl": lambda **given: ht.optim.FTRL(0.05, l1=0.001, **given),
    "stranger": lambda **given: Stranger(0.05, **given),
}
CLIPPED = {
    "as they are": {},
    "by value": {"clip_value": 0.02},
    "by norm": {"clip_norm": 0.05},
    "by both": {"clip_value": 0.02, "clip_norm": 0.05},
}
PRECISIONS = ["float32", "bfloat16", "float16"]
STRATEGIES = {
    "data": DataParallel,
    "micro-batches": lambda: DataParallel(accumulate=2),
    "zero1": lambda: ZeRO(1),
    "zero3": lambda: ZeRO(3),
}


def model(make, rows):
    """The loss of a product of rows, each looked up by one of two feeds, or by both."""
    scale, t = ht.placeholder("scale", ()), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        table = ht.variable("table", ht.init.zeros, (rows, WIDTH))
        one, two = (ht.embedding(table, ht.placeholder(name, (None, 2), "int64")) for name in ("one", "two"))
        h = ht.nn.LayerNorm(4 * WIDTH, name="norm")(ht.flatten(ht.concat([one, two], axis=1), 1))
        y = ht.nn.Linear(4 * WIDTH, 3, name="up")(h)
        loss = ht.mean(ht.softmax_cross_entropy(y, t)) * scale
        updates = make().minimize(loss)
    return {"train": [loss, updates], "fetch": [loss, updates, updates.gradients[table]], "values": [*updates]}


def batch(step, places, scale=1.0):
    """Ids of these rows, some of which come often."""
    rng = np.random.default_rng(step)
    ids = places[np.concatenate([np.arange(len(places)), rng.integers(0, len(places), 32 - len(places))])]
    one, two = rng.permutation(ids).reshape(2, 8, 2)
    return {"one": one, "two": two, "t": rng.integers(0, 3, 8), "scale": np.float32(scale)}


def executor(make, rows, **options):
    graph = model(make, rows)
    return ht.Executor(graph, **options), [v.name for v in graph["values"]]


def begin(folder, make, precision):
    """Checkpoints of a training in which all rows have moved: of the whole table, and of one of a few of its rows."""
    for name, rows, places in (("whole", ROWS, slice(None)), ("few", len(SEEN), SEEN)):
        ex, _ = executor(make, rows, precision=precision)
        for key, value in ex.state.items():
            if value.dtype == np.float32 and key != "loss_scale":
                shape = (ROWS, WIDTH) if "table" in key else value.shape
                made = np.random.default_rng(len(key)).uniform(0.01, 0.1, shape)
                ex.state[key] = made[places] if "table" in key else made
        ex.save(folder / name)


def trained(file, make, rows, places, scales, entry="train", **options):
    """The values of all variables before the first step and after each, by name."""
    ex, names = executor(make, rows, **options)
    ex.load(file)
    found = [dict(zip(names, ex.run("values")))]
    for step, scale in enumerate(scales):
        ex.run(entry, batch(step, places, scale))
        found.append(dict(zip(names, ex.run("values"))) | {n: ex.state[n] for n in ex.state if "loss_scale" in n})
    return found


def check(folder, optimizer, precision, clipped, ranks=1, strategy=DataParallel, **options):
    """A step that overflows, in float16, is among those that are compared with the table of few rows."""
    scales = (1.0, 1e9, 1.0, 2.0) if precision == "float16" else (1.0, 1.0, 2.0)

    def make():
        return OPTIMIZERS[optimizer](**CLIPPED[clipped])

    def work(comm):
        given = {"strategy": strategy(), "comm": comm} if ranks > 1 else {}
        return trained(folder / "whole", make, ROWS, SEEN, scales, precision=precision, **given, **options)

    begin(folder, make, precision)
    few = np.arange(len(SEEN))
    wanted = trained(folder / "few", make, len(SEEN), few, scales, precision=precision, passes=DENSE)
    rest = np.setdiff1d(np.arange(ROWS), SEEN)
    rounded = ranks > 1 and precision != "float32"  # as halves of gradients are, before they are added
    near = {"rtol": 1e-2, "atol": 2e-3} if rounded else {"rtol": 2e-4, "atol": 2e-6}
    for found in run_ranks(ranks, work) if ranks > 1 else [work(None)]:
        for before, after, want in zip(found[:-1], found[1:], wanted[1:], strict=True):
            for name, value in after.items():
                if "table" in name:
                    np.testing.assert_array_equal(value[rest], before[name][rest], err_msg=name)
                    value = value[SEEN]
                np.testing.assert_allclose(value, want[name], err_msg=name, **near)
        if precision == "float16":
            for name in found[0]:
                np.testing.assert_array_equal(found[2][name], found[1][name], err_msg=name)


def few(cases, kept):
    """All cases, those that are not `kept` nightly."""
    return [pytest.param(*case, marks=() if kept(*case) else pytest.mark.nightly) for case in cases]


ALONE = few(
    product(OPTIMIZERS, PRECISIONS, CLIPPED),
    lambda optimizer, precision, clipped: (
        optimizer == "adam" or (precision == "float16" and clipped in ("as they are", "by both"))
    ),
)
ON_RANKS = few(
    product(("rates", "adam", "momentum"), PRECISIONS, CLIPPED, STRATEGIES),
    lambda optimizer, precision, clipped, strategy: (
        optimizer == "momentum" and precision == "float16" and (strategy == "data" or clipped == "as they are")
    ),
)


@pytest.fixture(autouse=True)
def precise(request):
    """bfloat16 where there is one."""
    if "bfloat16" in getattr(request.node, "callspec", request).params.values():
        pytest.importorskip("ml_dtypes")


@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize(("optimizer", "precision", "clipped"), ALONE)
@pytest.mark.sampled(8)
def test_rows_that_are_not_looked_up_keep_their_bits(optimizer, precision, clipped, tmp_path):
    check(tmp_path, optimizer, precision, clipped)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize(("optimizer", "precision", "clipped", "strategy"), ON_RANKS)
def test_so_they_do_on_ranks(optimizer, precision, clipped, strategy, tmp_path):
    check(tmp_path, optimizer, precision, clipped, 2, STRATEGIES[strategy])


@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_who_looks_at_a_gradient_changes_nothing(precision, tmp_path):
    check(tmp_path, "adam", precision, "as they are", entry="fetch")


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("clipped", CLIPPED)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_decayed_gradient_is_one_of_all_rows(precision, clipped, tmp_path):
    def make():
        return ht.optim.Momentum(0.1, 0.5, weight_decay=0.5, **CLIPPED[clipped])

    begin(tmp_path, make, precision)
    given = [tmp_path / "whole", make, ROWS, SEEN, (1.0, 2.0)]
    found, wanted = (trained(*given, precision=precision, passes=passes) for passes in (None, DENSE))
    for after, want in zip(found, wanted, strict=True):
        for name, value in after.items():
            np.testing.assert_allclose(value, want[name], rtol=2e-4, atol=2e-6, err_msg=name)
    rows = [name for name in found[0] if "table" in name]
    assert all((found[0][name] != found[1][name]).any(1).all() for name in rows)


@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_no_array_of_the_size_of_the_table_is_made(optimizer, precision):
    """Of a table that nobody clips, which are then most of the bytes of a step."""
    ex, _ = executor(OPTIMIZERS[optimizer], 10_000, precision=precision)
    plan = ex.program("train", batch(0, SEEN)).plan
    assert plan.arena_bytes < 10_000 * WIDTH * 4
    made = [(n, slot) for n in plan.order for slot, t in enumerate(types_of(n)) if t.shape == (10_000, WIDTH)]
    assert made and all(plan.storage(*value).home is not None for value in made)
