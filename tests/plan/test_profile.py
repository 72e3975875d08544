"""Profiles: tables between and beyond what was measured, what falls back on what, files, clusters, the command."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import numpy as np
import pytest

import hetu as ht
from hetu import cli
from hetu.core.errors import ArgumentError
from hetu.cpu_kernels import fed
from hetu.dist import DataParallel, Link, Pipeline, run_ranks
from hetu.dist.comm.seat import Seat
from hetu.plan import Cluster, MachineProfile, Measured, Table
from hetu.plan.costs.calibrate import measure, table
from hetu.plan.costs.links import DeviceFigures
from hetu.plan.costs.profile import cache_path, known_profile

from ..dist.models import mlp

DEVICE = DeviceFigures(flops=1e9, bandwidth=1e9, launch=1e-6)


def product(n, dtype="float32"):
    return ht.placeholder("a", (n, n), dtype) @ ht.placeholder("b", (n, n), dtype)


def test_a_table_is_exact_where_it_was_measured_and_never_one_line():
    points = [(1, 1.0), (10, 1.1), (100, 5.0), (1000, 6.0)]
    made = Table(reversed(points))
    assert [made.seconds(a) for a, _ in points] == [s for _, s in points]
    assert made.seconds(55) == pytest.approx((1.1 + 5.0) / 2)
    assert made.seconds(0) == 1.0
    assert made.seconds(2000) == pytest.approx(12.0)
    assert Table([(10, 2.0)]).seconds(30) == 6.0
    with pytest.raises(ArgumentError, match="without points"):
        Table([])


def test_a_measured_link_scales_to_other_numbers_of_ranks_as_its_algorithm_does():
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    line = Link(latency=0.0, bandwidth=1e6)
    rows = {kind: {4: Table([(n, line.seconds(kind, 4, n)) for n in (1000, 2000)])} for kind in kinds}
    link = Measured({**rows, "barrier": {4: Table([(0, 2e-5)])}})
    for kind in kinds:
        for ranks in (2, 4, 16):
            assert link.seconds(kind, ranks, 1500) == pytest.approx(line.seconds(kind, ranks, 1500))
    assert link.seconds("barrier", 16, 0) == pytest.approx(4e-5)
    with pytest.raises(ArgumentError, match="not measured for 'gather'"):
        link.seconds("gather", 4, 1)


def test_an_instruction_then_its_operator_then_the_machine():
    profile = MachineProfile(DEVICE)
    assert profile.seconds(product(100)) == pytest.approx(2e-3 + 1e-6)  # 2e6 operations
    assert profile.seconds(ht.exp(ht.placeholder("x", (1000,)))) == pytest.approx(8e-6 + 1e-6)  # 8000 bytes
    profile.add(product(100), 4e-3)
    profile.add(product(300), 81e-3)
    assert profile.seconds(product(100)) == 4e-3
    assert 4e-3 < profile.seconds(product(200)) < 81e-3
    assert profile.seconds(ht.exp(ht.placeholder("x", (1000,)))) == pytest.approx(9e-6)  # still the machine
    profile.add(product(100), 6e-3)
    assert profile.seconds(product(100)) == pytest.approx(5e-3)


def test_what_was_all_overhead_does_not_blow_up():
    profile = MachineProfile(DEVICE)
    profile.add(product(2), 1e-5)  # 48 ns of work in 10 us
    assert profile.seconds(product(100)) == pytest.approx(1e-5 + 8 * 2e-3, rel=1e-3)
    profile.add(product(50), 5e-4)  # twice the ideal
    assert profile.seconds(product(100)) == pytest.approx(5e-4 + 2 * (2e-3 - 2.5e-4))
    assert 1e-6 < profile.seconds(product(1)) < 1e-5


def test_it_learns_every_instruction_of_a_rank_that_is_alone():
    graph, feeds = mlp()
    profile = MachineProfile(DEVICE)
    profile.learn(graph["train"], feeds[0], DataParallel(), rank=2, world_size=4, repeat=1)
    steps = ht.Executor(graph["train"], strategy=DataParallel(), comm=Seat(2, 4)).program(feeds[0]).steps
    assert {t.op.split()[0] for t in profile.timings.values()} == {s.node.op.name for s in steps}
    assert all(t.seconds > 0 for t in profile.timings.values())


def test_of_a_pipeline_it_learns_a_rank_of_each_stage():
    """And times what `heturun` gives a rank: no two threads, of which the clock would see one."""
    graph, feeds = mlp()
    whole, single = MachineProfile(DEVICE), MachineProfile(DEVICE)
    whole.learn(graph["train"], feeds[0], Pipeline(2, 2), world_size=2, repeat=1)
    for rank in range(2):
        single.learn(graph["train"], feeds[0], Pipeline(2, 2), rank=rank, world_size=2, repeat=1)
    assert whole.timings.keys() == single.timings.keys()


@pytest.mark.compiled
def test_what_is_fed_is_copied_in_the_steps_that_it_times(monkeypatch):
    """As the time of copying is subtracted; a process alone reads a large array where it lies."""
    x, taken, take = ht.placeholder("x", (64, 1024)), [], fed.Lent.take
    monkeypatch.setattr(fed.Lent, "take", lambda lent, array: (taken.append(array), take(lent, array)))
    feed = {x: np.ones(x.shape, np.float32)}
    MachineProfile(DEVICE).learn([ht.sum(x * 2.0)], feed, repeat=2)
    assert not taken
    executor = ht.Executor([ht.sum(x * 2.0)])
    for _ in range(2):
        executor.run(feed)
    assert taken


def test_a_file_gives_back_the_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    links = Measured({"message": {2: Table([(1, 2.0)])}})
    cluster = Cluster((2, 2), links, Link(1e-6, 1e9), replace(DEVICE, memory=1e9), "two hosts", 2.5, 2)
    profile = MachineProfile(DEVICE, cluster, step=1e-4, speeds={3: 2.0}, host="h")
    profile.add(product(3), 1e-5)
    assert profile.save() == cache_path()
    assert cache_path().parent == tmp_path / "hetu"
    assert [f.name for f in cache_path().parent.iterdir()] == [cache_path().name]
    assert MachineProfile.load() == profile
    usual = {f.name: f.default for of in (profile, cluster) for f in fields(of)}
    assert all(
        getattr(of, f.name) != usual[f.name] for of in (profile, cluster) for f in fields(of) if f.name != "version"
    )
    with pytest.raises(ArgumentError, match=r"no profile at .*none") as caught:
        MachineProfile.load(tmp_path / "none")
    assert "hetu profile" in caught.value.fix


@pytest.mark.parametrize(
    "change",
    [
        *({"version": 0}, {"timings": {"x": [1]}}, {"links": {}}, {"hosts": 3}, {"device": {}}),
        *({"cluster": {"hosts": 3}}, {"cluster": {"inner": {}}}, {"speeds": {"first": 2.0}}, {"step": "1"}),
    ],
)
def test_a_file_that_is_no_profile(change):
    data = json.loads(MachineProfile().to_json())
    with pytest.raises(ArgumentError, match="not a profile|version 0"):
        MachineProfile.from_json(json.dumps(data | change))
    with pytest.raises(ArgumentError, match="not a profile"):
        MachineProfile.from_json("[")


def test_a_cluster_that_one_does_not_have():
    figures = DeviceFigures(792.1e12, 3.35e12, 80e9, host_bandwidth=64e9, flops32=67e12, peak=989e12)
    cluster = Cluster((8, 4), Link(3e-6, 450e9), Link(1e-5, 50e9), figures, "two hosts")
    assert (cluster.world_size, cluster.name) == (12, "two hosts")
    assert [cluster.host(r) for r in (0, 7, 8, 11)] == [0, 0, 1, 1]
    assert cluster.link((3, 1)).bandwidth == 450e9
    assert cluster.link((7, 8)).bandwidth == 50e9
    assert cluster.device == ht.plan.cluster("dgx-h100").device
    profile = MachineProfile.of(cluster)
    assert profile.seconds(product(4096)) == pytest.approx(2 * 4096**3 / 67e12 + 5e-6)
    assert profile.seconds(product(4096, "float16")) == pytest.approx(2 * 4096**3 / 792.1e12 + 5e-6)
    with pytest.raises(ArgumentError, match="nothing of its devices"):
        MachineProfile.of(Cluster())


class Slow:
    """A link of a kind that profiles cannot write."""

    def message(self, nbytes):
        return 1.0

    def seconds(self, kind, ranks, nbytes):
        return 2.0


def test_a_link_of_another_kind_counts_but_cannot_be_written():
    profile = MachineProfile(cluster=Cluster((2,), Slow(), Slow()))
    x = ht.placeholder("x", (4,))
    loss = ht.mean(x * ht.variable("w", 1.0, (4,)))
    step = [loss, ht.optim.SGD(0.1).minimize(loss)]
    assert ht.plan.simulate(step, ht.dist.DataParallel(), profile, world_size=2, shapes={}).time > 2.0
    with pytest.raises(ArgumentError, match="has no form as data"):
        profile.to_json()


def test_ranks_measure_their_links_together():
    profiles = run_ranks(2, lambda comm: measure(comm, quick=True))
    inner = profiles[0].cluster.inner
    assert {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message"} < set(inner.tables)
    assert profiles[1].cluster.inner == inner
    assert all(s > 0 for rows in inner.tables.values() for t in rows.values() for _, s in t.points)
    assert "all_reduce of 2 ranks" in table(profiles[0])


@pytest.mark.kernels
def test_the_command_writes_a_profile(tmp_path, capsys):
    assert cli.main(["profile", "--quick", "--output", str(tmp_path / "p.json")]) == 0
    printed = capsys.readouterr().out
    assert "GFLOP/s" in printed
    assert str(tmp_path / "p.json") in printed
    timings = MachineProfile.load(tmp_path / "p.json").timings
    assert {"matmul float32", "flash_attention float32"} <= {t.op for t in timings.values()}


def test_a_seat_gives_a_rank_its_own_data():
    x, out = np.arange(4.0), np.empty((3, 4))
    seat = Seat(1, 3)
    seat.all_gather(x, out)
    assert (out == x).all()
    seat.recv(x, 0)
    assert not x.any()
    assert seat.split((1, 2)).ranks == (1, 2)


def test_a_profile_that_cannot_be_read_is_told_and_none_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert known_profile() == MachineProfile()
    MachineProfile(version=2).save()
    with pytest.warns(
        RuntimeWarning, match="typical machine, as .* is a profile of version 2, wanted 3; measure again"
    ):
        assert known_profile() == MachineProfile()
