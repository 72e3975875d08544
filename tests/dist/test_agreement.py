"""What each rank will do fits what the others do, for every strategy, model and placed graph; what differs is said."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import GraphError
from hetu.core.graph import replace, topological
from hetu.dist import DUP, MAX, DataParallel, ExpertParallel, Heterogeneous, Mesh, Pipeline, TensorParallel, run_ranks
from hetu.dist.comm.comm import Comm
from hetu.dist.cut.agreement import misfit
from hetu.dist.cut.pipeline_strategy import Staged
from hetu.dist.layout import collectives

from ..pairs import in_turn, nightly
from .models import MODELS, mlp
from .placed import built, calls_of_ranks, case, misfits, static_misfit, trained
from .test_hierarchical import EXPERTS, HOSTS
from .test_hints import expert_feeds, expert_strategy, mixture, sequence_block
from .test_microbatches import MODELS as OWN_BATCHES
from .test_microbatches import WAYS, Descent
from .test_place import CASES as PLACES
from .test_strategies import CASES, JOINED, SPLIT, STRATEGIES, TIED, tied

# -- no rank runs: each is asked what it would do ----------------------------------------------------------------------

CHUNK = 100
NUMBERS = [pytest.param(n, marks=pytest.mark.nightly if n else ()) for n in range(0, 2000, CHUNK)]
RUN = range(0, 2000, 61)  # those that run too
MISTAKEN = [number for number in RUN if case(number).ranks == 4]  # these communicate
GROUPS = {
    "a pair and one": ([(0, 1), (2,)], (2, 1)),
    "one and a pair": ([(0,), (1, 2)], (1, 2)),
    "three and one": ([(0, 1, 2), (3,)], (2, 1)),
    "two, one and three": ([(0, 1), (2,), (3, 4, 5)], (2, 1, 3)),
}
SPREAD = {f"{strategy}, {model}, {n}": (MODELS[model], STRATEGIES[strategy], n) for strategy, model, n in CASES}
SPREAD |= {f"{way}, watched, 4": (JOINED["watched"], STRATEGIES[way], 4) for way in STRATEGIES}
SPREAD |= {f"{way}, tied, {n}": (tied, STRATEGIES[way], n) for way, n in TIED}
SPREAD |= {
    f"{name}, {model}": (MODELS[model], lambda given=given: Heterogeneous(*given, split=SPLIT), sum(map(len, given[0])))
    for name, given in GROUPS.items()
    for model in MODELS
}
SPREAD |= {
    f"{stages} stages, {schedule}, {model}, {data}": (
        MODELS[model],
        lambda stages=stages, data=data, schedule=schedule: Pipeline(stages, 2, schedule, data=data),
        stages * data,
    )
    for stages, data in ((2, 1), (2, 2), (3, 1))
    for schedule in ("gpipe", "1f1b", "pipedream")
    for model in ("mlp", "transformer")
    if not (stages == 3 and model == "mlp")
}
SPREAD |= {
    f"{way}, {model}, by micro-batch": (lambda model=model: OWN_BATCHES[model](Descent()), make, ranks)
    for way, (ranks, _, make) in WAYS.items()
    for model in OWN_BATCHES
    if way != "experts" or model == "experts"
}
SPREAD |= {f"place: {name}": (lambda model=model: (model(), None), way, n) for name, (model, way, n) in PLACES.items()}
SPREAD |= {f"sequence, {n}": (lambda n=n: sequence_block(n), TensorParallel, n) for n in (2, 4)}
SPREAD |= {
    f"experts, {n}": (lambda n=n: (mixture(n), expert_feeds(1)), lambda n=n: expert_strategy(n), n) for n in (2, 4)
}
SPREAD["experts on hosts"] = (
    lambda: (mixture(4, hinted=False), None),
    lambda: ExpertParallel(EXPERTS, hosts=HOSTS[4]),
    4,
)


PRODUCTS = [spread for spread in SPREAD if spread.endswith("by micro-batch")]  # of which most kinds are in a sixth
KINDS = [spread for spread in SPREAD if spread not in PRODUCTS]
SIZES = [(k + k // 2) % 2 > 0 for k in range(len(KINDS))]  # whose turns are not those of two and four ranks
OTHERS = nightly((spread, not small) for spread, small in zip(KINDS, SIZES))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("spread", "small"), [*zip(KINDS, SIZES), *OTHERS, *in_turn(6, PRODUCTS, [False, True])])
def test_ranks_fit_under_every_strategy_of_the_suite(spread, small):
    """In buckets of the usual size, and in small ones with a batch that ranks do not divide."""
    model, way, ranks = SPREAD[spread]
    graph, _ = model()
    strategy = built(way(), graph, ranks, 400 if small else None)
    batch = 7 if small and not isinstance(strategy, Staged) else 12  # which micro-batches divide
    assert static_misfit(graph, strategy, ranks, batch) is None


@pytest.mark.parametrize("first", NUMBERS)
def test_ranks_fit_in_random_placed_graphs(first):
    assert misfits(range(first, first + CHUNK)) == {}


# -- and some run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", RUN)
@pytest.mark.sampled(8)
def test_random_placed_graphs_equal_one_process(number):
    tried = case(number)
    values, wanted = trained(tried)
    for found in run_ranks(tried.ranks, lambda comm: trained(tried, comm)):
        np.testing.assert_allclose(found[1], wanted, atol=1e-5, rtol=1e-4)
        for value, of_one in zip(found[0], values):
            np.testing.assert_allclose(value, of_one, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", GROUPS)
def test_what_ranks_do_together_all_of_them_prepare_or_none(name, monkeypatch):
    """As MPI wants it, whatever some of them pack: the parts of a rank with whole variables do not lie in one piece."""
    noted = defaultdict(lambda: defaultdict(Counter))  # by group and rank

    def note(comm, fixed, kind, *given):
        if isinstance(comm, Comm):  # and no plan counts
            noted[comm.ranks][comm.rank][kind, fixed] += 1
        return call(comm, fixed, kind, *given)

    call = collectives._call
    monkeypatch.setattr(collectives, "_call", note)
    monkeypatch.setattr(collectives, "KEPT", 0)  # all buffers are large ones
    graph, feeds = mlp()
    run_ranks(
        sum(map(len, GROUPS[name][0])),
        lambda comm: ht.Executor(graph, comm=comm, strategy=Heterogeneous(*GROUPS[name], split=SPLIT)).run(
            "train", feeds[0]
        ),
    )
    assert len(noted) > 1
    for ranks in noted.values():
        assert len({frozenset(one.items()) for one in ranks.values()}) == 1


# -- what does not fit -------------------------------------------------------------------------------------------------


def changed(draw, words):
    """One rank's words of a track after a mistake of one kind, each as likely."""
    kind, at = draw.randrange(4), draw.randrange(len(words))
    if kind == 0:  # left out
        return words[:at] + words[at + 1 :]
    if kind == 1:  # twice
        return words[: at + 1] + words[at:]
    if kind == 2 and len(words) > 1:  # in another order
        return words[1:] + words[:1]
    return [*words[:at], words[at].replace("float32", "float16").replace("step", "steps"), *words[at + 1 :]]


@pytest.mark.parametrize("number", MISTAKEN)
def test_one_mistake_of_one_rank_is_found_and_both_sides_of_it_are_shown(number):
    draw, tried = random.Random(number), case(number)
    graph = tried.graph()
    calls = {rank: dict(of) for rank, of in calls_of_ranks(graph, tried.build(graph), tried.ranks, 5).items()}
    assert misfit(calls) is None
    rank = draw.choice([rank for rank, of in calls.items() if of])
    track = draw.choice(sorted(calls[rank]))
    calls[rank][track] = changed(draw, [*calls[rank][track]])
    _, one, other = misfit(calls).split("\n")
    assert one.split(" has ")[1].rstrip(",") != other.split(" has ")[1]


def first_reduction(outputs):
    return next(n for n in topological(outputs) if n.op.collective == "all_reduce")


def without(outputs):
    """The first reduction is left out."""
    it = first_reduction(outputs)
    return replace(outputs, {it: it.inputs[0]})


def by_maximum(outputs):
    it = first_reduction(outputs)
    src, dst = (Mesh((2, 1), ("data", "tensor")).layout(data=role) for role in (MAX, DUP))
    return replace(outputs, {it: it.op.make(it.inputs, {**it.attrs, "src": src, "dst": dst})})


def later(outputs):
    it = first_reduction(outputs)
    return replace(outputs, {it: it.op.make(it.inputs, {**it.attrs, "order": it.attrs["order"] + 1000})})


MISTAKES = {"left out": without, "another reduction": by_maximum, "another order": later}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_plan_that_does_not_fit_is_an_error_of_the_executor(mistake):
    """On every rank, before any communication of the step."""

    def act(comm):
        graph, feeds = mlp()
        ex = ht.Executor(graph, strategy=built(DataParallel(), graph, 2, 0), comm=comm)

        def fitted(fetches, updates, then):
            found = MISTAKES[mistake]((*fetches, *updates.values()))
            return found[: len(fetches)], dict(zip(updates, found[len(fetches) :]))

        if comm.rank == 1:
            ex.placement.fitted = fitted
        with pytest.raises(
            GraphError, match=r"the ranks would wait for each other: in the group of ranks 0-1\n"
        ) as caught:
            ex.run("train", feeds[0])
        _, zero, one, *_ = str(caught.value).split("\n")
        assert "rank 0 has step" in zero and "rank 1 has" in one and zero.split(" has ")[1] != one.split(" has ")[1]
        return True

    assert run_ranks(2, act) == [True, True]
