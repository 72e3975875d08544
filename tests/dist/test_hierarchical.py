"""All-to-all within hosts first: equal to the direct one bit for bit, fewer messages between hosts, less time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, ValueRangeError
from hetu.core.graph import topological
from hetu.dist import ExpertParallel, Layout, Link, Parallel, Shard, Strategy, VirtualClock, plan, run_ranks
from hetu.dist.comm.hierarchical import all_to_all, within_hosts
from hetu.dist.comm.threads import ThreadComm

from ..pairs import pairwise
from .models import batches, communicating, communication, losses
from .test_hints import expert_feeds, mixture

HOSTS = {4: ((0, 1), (2, 3)), 6: ((0, 1, 2), (3, 4, 5)), 8: ((0, 1, 2, 3), (4, 5, 6, 7))}
EXPERTS = {"mixture/up": 0, "mixture/down": 0}


def hosts_of(hosts):
    return {rank: host for host, ranks in enumerate(hosts) for rank in ranks}


@pytest.fixture
def messages(monkeypatch):
    """(bytes, messages) that all_to_alls send between ranks of different hosts, by hosts."""
    found: Counter[str] = Counter()
    start = ThreadComm._start

    def counted(comm, call):
        if call.kind == "all_to_all":
            home = hosts_of(counted.hosts)
            for rank, count in zip(comm.ranks, call.counts[0]):
                if home[rank] != home[comm.ranks[comm.rank]] and count:
                    found.update(messages=1, bytes=count * call.x.itemsize)
        return start(comm, call)

    monkeypatch.setattr(ThreadComm, "_start", counted)
    found.over = lambda hosts: setattr(counted, "hosts", hosts)
    return found


@pytest.mark.parametrize("hosts", [*HOSTS.values(), ((0, 2), (1, 3)), ((0, 1), (2, 3), (4, 5)), ((3, 1), (2, 0))])
def test_equal_to_the_direct_one_for_blocks_of_any_size(hosts):
    n = sum(map(len, hosts))
    rng = np.random.default_rng(n)
    sizes = rng.integers(0, 4, (n, n))
    given = [rng.normal(size=sizes[r].sum()) for r in range(n)]
    rows = within_hosts(range(n), hosts)

    def run(comm):
        direct, found = (np.zeros(sizes[:, comm.rank].sum()) for _ in range(2))
        comm.all_to_all(given[comm.rank], direct, (sizes[comm.rank], sizes[:, comm.rank]))
        all_to_all(comm, given[comm.rank], found, sizes.tolist(), rows)
        return direct, found

    for direct, found in run_ranks(n, run):
        np.testing.assert_array_equal(found, direct)


@pytest.mark.parametrize("ranks", HOSTS)
def test_a_change_of_layout_sends_the_same_bytes_in_fewer_messages(ranks, messages):
    layouts = [Layout(Shard(tuple(range(ranks)), ((axis, ranks),))) for axis in (0, 1)]
    shape = (2 * ranks + 1, 3 * ranks - 1)  # parts of unequal size
    whole = np.random.default_rng(0).normal(size=shape)
    way, hosts, seen = plan(*layouts, shape), HOSTS[ranks], []
    messages.over(hosts)

    def run(comm, way):
        box = tuple(slice(*span) for span in way.before[comm.rank].box)
        out = np.empty(way.after[comm.rank].shape)
        way.run(comm, np.ascontiguousarray(whole[box]), out)
        return out

    for chosen in (way, way.over(hosts)):
        messages.clear()
        found = run_ranks(ranks, lambda comm, chosen=chosen: run(comm, chosen))
        for rank, part in enumerate(found):
            np.testing.assert_array_equal(part, whole[tuple(slice(*span) for span in way.after[rank].box)])
        seen.append(dict(messages))
    direct, hierarchical = seen
    assert direct["bytes"] == hierarchical["bytes"]
    per_host = ranks // 2
    assert direct["messages"] == ranks * per_host and hierarchical["messages"] == ranks


def test_hosts_of_unequal_size_and_single_hosts_exchange_directly():
    assert within_hosts((0, 1, 2), ((0, 1), (2,))) == ()
    assert within_hosts((0, 1), ((0, 1), (2, 3))) == ()
    assert within_hosts((0, 2), ((0, 1), (2, 3))) == ()
    assert within_hosts((0, 1, 2), ((0, 1),)) == ()


# -- experts ---------------------------------------------------------------------------------------------------------


ROUTED = {"*experts/*": 0}
COUNT, ROOM, WIDTH = 8, 6, 8


def routed(groups=0):
    """Tokens choose two experts each; in groups they compete for room with their group alone."""
    x, t = ht.placeholder("x", (None, WIDTH)), ht.placeholder("t", (None,), "int64")
    with ht.scope("routed"):
        h = ht.tanh(ht.nn.Linear(WIDTH, WIDTH, name="first")(x))
        h = ht.reshape(h, (groups, -1, WIDTH)) if groups else h
        values, experts = ht.topk(ht.softmax(ht.nn.Linear(WIDTH, COUNT, name="gate")(h)), k=2)
        slots = ht.moe_slots(experts, count=COUNT, capacity=ROOM)
        rooms = ht.moe_dispatch(h, slots, ht.ones_like(values), experts=COUNT, capacity=ROOM)
        up = ht.variable("experts/up", ht.init.xavier_uniform, (COUNT, WIDTH, 2 * WIDTH))
        down = ht.variable("experts/down", ht.init.xavier_uniform, (COUNT, 2 * WIDTH, WIDTH))
        h = ht.reshape(h + ht.moe_combine(ht.relu(rooms @ up) @ down, slots, values), (-1, WIDTH))
        loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(WIDTH, 5, name="head")(h), t))
        return {"train": [loss, ht.optim.Adam(0.01).minimize(loss)]}, batches((WIDTH,), 5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_rooms_of_groups_travel_to_their_experts_and_back_by_all_to_all(ranks):
    """Each rank sends what does not stay with it."""
    model, way = lambda: routed(groups=4), ExpertParallel(ROUTED)
    wanted = losses(model, steps=5)
    for found in run_ranks(ranks, lambda comm: losses(model, way, comm, steps=5)):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)

    def moved(model):
        nodes = [n for n in communicating(model, way, ranks) if COUNT in n.attrs["shape"] and len(n.attrs["shape"]) > 2]
        return [(n.op.name, plan(n.attrs["src"], n.attrs["dst"], n.attrs["shape"]).moved) for n in nodes]

    rooms = COUNT * ROOM * WIDTH
    assert moved(model) == [("all_to_all", 4 * rooms * (ranks - 1) // ranks)] * 4


def spread(array: np.ndarray, parts: int) -> np.ndarray:
    """Which of `parts` ranks has each row."""
    return np.searchsorted([len(array) * (k + 1) // parts for k in range(parts)], np.arange(len(array)), "right")


ROUTES = {  # how many ranks share the batch, of how many
    "experts": (lambda n: ExpertParallel(ROUTED), 1),
    "experts, zero": (lambda n: Parallel(experts=ROUTED, zero=3), 1),
    "experts x tensor": (lambda n: Parallel(experts=ROUTED, tensor=2, split={"*head/weight": 1, "*head/bias": 0}), 2),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "ranks", "tokens"), pairwise(ROUTES, [2, 3, 4], [12, 11]))
def test_tokens_that_compete_with_all_travel_to_their_experts_and_back_by_all_to_all(name, ranks, tokens, messages):
    """No rank sends more than its own tokens, and only those that have found room and do not stay with it."""
    make, width = ROUTES[name]
    graph, feeds = routed()
    feeds = [{key: value[:tokens] for key, value in feed.items()} for feed in feeds[:3]]
    (slots,) = (n for n in topological(graph["train"][:1]) if n.op.name == "moe_combine")
    alone = ht.Executor({**graph, "slots": [slots.inputs[1]]})
    wanted, sent = [], 0
    for feed in feeds:
        (chosen,) = alone.run("slots", {"x": feed["x"]})
        home, expert = spread(chosen, ranks)[:, None], spread(np.arange(COUNT), ranks)[chosen // ROOM]
        sent += 4 * width * WIDTH * 4 * int(((home != expert) & (chosen >= 0)).sum())
        wanted.append(float(alone.run("train", feed)[0]))
    messages.over([(r,) for r in range(width * ranks)])

    def run(comm):
        graph, _ = routed()
        executor = ht.Executor(graph, strategy=make(ranks), comm=comm)
        found = [float(executor.run("train", feed)[0]) for feed in feeds]
        nodes = [s.node for s in executor.program("train", feeds[0]).steps if s.node.op.collective]
        return found, Counter(n.op.collective for n in nodes if n.inputs[-1].dtype.kind == "i")

    for found, calls in run_ranks(width * ranks, run):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
        assert calls == {"all_gather": 1, "all_to_all": 4}  # what all have chosen, once
    assert messages["bytes"] == sent


@pytest.mark.parametrize(
    ("slots", "text"), [([4, 0], "slot 4 at position"), ([-2, 0], "slot -2 at"), ([1, 1], "slot 1 is given 2 times")]
)
def test_slots_that_cannot_be_are_found_though_no_rank_has_them_all(slots, text):
    x, s = ht.placeholder("x", (None, 3)), ht.placeholder("s", (None, 1), "int64")
    with ht.scope("fed"):
        up = ht.variable("experts/up", ht.init.ones, (2, 3, 3))
    rooms = ht.moe_dispatch(x, s, ht.ones_like(x[:, :1]), experts=2, capacity=2)
    y = ht.moe_combine(rooms @ up, s, ht.ones_like(x[:, :1]))
    loss = ht.mean(y)
    entries = [loss, ht.optim.SGD(0.1).minimize(loss)]

    def run(comm):
        executor = ht.Executor(entries, strategy=ExpertParallel({"*up": 0}), comm=comm)
        with pytest.raises(ValueRangeError, match=text):
            executor.run({"x": np.ones((2, 3), "f4"), "s": np.array(slots)[:, None]})

    run_ranks(2, run)


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_over_ranks_need_no_hints(ranks):
    feeds, model = expert_feeds(), lambda: (mixture(ranks, hinted=False), feeds)
    wanted = losses(model, steps=5)
    for found in run_ranks(ranks, lambda comm: losses(model, ExpertParallel(EXPERTS), comm, steps=5)):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
    assert communication(model, ExpertParallel(EXPERTS), ranks) == {"all_to_all": 3, "all_reduce": 2}


def test_experts_on_two_hosts(messages):
    feeds, hosts, seen = expert_feeds(3), HOSTS[4], []
    model = lambda: (mixture(4, hinted=False), feeds)  # noqa: E731
    messages.over(hosts)
    for strategy in (ExpertParallel(EXPERTS), ExpertParallel(EXPERTS, hosts=hosts)):
        messages.clear()
        seen.append((run_ranks(4, lambda comm, s=strategy: losses(model, s, comm, steps=3)), dict(messages)))
    (direct, before), (found, after) = seen
    assert found == direct  # bit for bit
    assert before["messages"] == 3 * 3 * 4 * 2 and after["messages"] == before["messages"] // 2
    assert before["bytes"] == after["bytes"]


def test_hosts_are_plain_data():
    graph = mixture(4, hinted=False)
    strategy = ExpertParallel(EXPERTS, hosts=HOSTS[4]).build([*graph["train"][:1], *graph["train"][1].values()], 4)
    read = Strategy.from_json(strategy.to_json())
    assert read == strategy and read.hosts == HOSTS[4]
    with pytest.raises(ArgumentError, match=r"hosts \(\(0, 1\), \(2, 3\)\), the job has 6 ranks"):
        read.check(graph["train"][:1], 6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("nbytes", "gain"), [(1 << 12, 3.0), (1 << 22, 0.95)])
def test_time_on_the_virtual_clock(nbytes, gain):
    """Few tokens are sped up by the number of messages saved; many lose only what they take inside a host."""
    hosts = HOSTS[8]
    home = hosts_of(hosts)
    inside, between = Link(1e-6, 50e9), Link(50e-6, 1e9)
    rows = within_hosts(range(8), hosts)
    size = nbytes // 8 // 8
    sizes = [[size] * 8] * 8

    def run(comm):
        clock = VirtualClock(comm, lambda ranks: inside if len({home[r] for r in ranks}) == 1 else between, lambda: 0.0)
        x, out, times = np.zeros(8 * size), np.zeros(8 * size), [0.0]
        for act in (lambda: clock.all_to_all(x, out), lambda: all_to_all(clock, x, out, sizes, rows)):
            act()
            times.append(clock.now)
        return times[1], times[2] - times[1]

    for direct, hierarchical in run_ranks(8, run):
        assert direct / hierarchical > gain


def test_a_pass_writes_the_hosts_into_the_graph():
    def run(comm):
        strategy = ExpertParallel(EXPERTS, hosts=HOSTS[4])
        ex = ht.Executor(mixture(4, hinted=False), strategy=strategy, comm=comm)
        nodes = [s.node for s in ex.program("train", expert_feeds(1)[0]).steps]
        return [n.attrs["hosts"] for n in nodes if n.op.name == "all_to_all"]

    assert run_ranks(4, run)[0] == [HOSTS[4]] * 3
