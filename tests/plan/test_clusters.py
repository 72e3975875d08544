"""Clusters as text: the figures that are shipped, hosts behind a colon, and what is said of files that are wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.dist import Link
from hetu.plan.costs.links import KNOWN
from hetu.plan.costs.profile import MachineProfile

GOOD = """
name = "box"
devices = 4
price = 2
[device]
flops = 1e12
bandwidth = 1e11
[inner]
latency = 1e-6
bandwidth = 1e10
[outer]
latency = 1e-5
bandwidth = 1e9
"""
# (peak, flops32, memory of a device), bandwidth between hosts and network cards, from the data sheets once more; beside
# them what part of the peak and of the links inside a host was ever measured.
SHEETS = {
    "cpu-host": ((64 * 2.45e9 * 32, 0.0, 256e9, 25e9 / 8, 1), 1.0, 10e9),
    "dgx-a100": ((312e12, 19.5e12, 80e9, 200e9 / 8, 8), 0.859, 0.69 * 600e9 / 2),
    "dgx-h100": ((1979e12 / 2, 67e12, 80e9, 400e9 / 8, 8), 0.801, 900e9 / 2),
    "dgx-h200": ((1979e12 / 2, 67e12, 141e9, 400e9 / 8, 8), 0.803, 900e9 / 2),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in KNOWN.glob("*.toml")))
def test_a_shipped_cluster_has_the_figures_of_its_sheet(name):
    found = ht.plan.cluster(f"{name}:2")
    d = found.device
    sheet, reached, inner = SHEETS[name]
    peak = d.promised(np.dtype("float16"))
    assert (peak, d.flops32, d.memory, found.outer.bandwidth, found.rails) == pytest.approx(sheet, rel=0.005)
    assert (d.flops / peak, found.inner.bandwidth) == pytest.approx((reached, inner), rel=0.005)
    assert d.promised(np.dtype("float32")) == (d.flops32 or d.flops)
    assert (found.hosts, found.price) == ((found.world_size // 2,) * 2, None)
    assert MachineProfile.of(found).device is d
    assert "# price" in (KNOWN / f"{name}.toml").read_text("utf-8")


@pytest.mark.parametrize(
    ("hosts", "line", "sizes"),
    [("", "", (4,)), (":3", "", (4, 4, 4)), ("", "hosts = 2", (4, 4)), (":1", "hosts = 2", (4,))],
)
def test_a_file_of_ones_own_with_hosts_behind_a_colon(tmp_path, hosts, line, sizes):
    path = tmp_path / "my.box.toml"
    path.write_text(f"{line}\n{GOOD}")
    found = ht.plan.cluster(f"{path}{hosts}")
    assert (found.hosts, found.price, found.name) == (sizes, 2, f"{len(sizes)} x box")
    assert (found.inner, found.outer) == (Link(1e-6, 1e10), Link(1e-5, 1e9))
    assert found.device == ht.plan.DeviceFigures(1e12, 1e11)


@pytest.mark.parametrize(
    ("ranks", "bandwidth"),
    [
        ((0, 1, 2, 3), 8e9),  # on one host
        ((0, 4), 1e9),  # one of each host sends over one card
        ((0, 1, 4, 5), 2e9),
        ((0, 1, 2, 4), 1e9),  # the host with one of them is the slower
        (range(12), 3e9),  # as many as there are cards
    ],
)
def test_ranks_of_one_host_share_the_work_among_its_network_cards(ranks, bandwidth):
    hosts = ht.plan.Cluster((4, 4, 4), Link(1e-6, 8e9), Link(1e-5, 1e9), rails=3)
    assert hosts.link(tuple(ranks)).bandwidth == bandwidth
    assert replace(hosts, inner=Link(1e-6, 1.5e9)).link((0, 1, 4, 5)).bandwidth == 1.5e9


WRONG = {
    "a link is missing": ("[outer]\nlatency = 1e-5\nbandwidth = 1e9\n", "", "my.toml: misses outer", "outer = ..."),
    "a link of another name": ("[outer]", "[outter]", "my.toml: takes no 'outter'", "'outer'"),
    "half a link": ("latency = 1e-5\n", "", r"my.toml, \[outer\]: misses latency", "latency = ..."),
    "a key of a link": ("latency = 1e-5", "delay = 1e-5", r"my.toml, \[outer\]: takes no 'delay'", "latency"),
    "a negative latency": ("1e-6", "-1e-6", r"my.toml, \[inner\]: got latency=-1e-06", "0 at least"),
    "a bandwidth of none": ("1e10", "0", r"my.toml, \[inner\]: got bandwidth=0", "above 0"),
    "a word for a number": ("1e12", '"fast"', r"my.toml, \[device\]: got flops='fast'", "number"),
    "nan": ("1e12", "nan", r"my.toml, \[device\]: got flops=nan", "number"),
    "a key of a device": ("flops", "flop", r"my.toml, \[device\]: takes no 'flop'", "'flops'"),
    "no devices": ("devices = 4", "devices = 0", "my.toml: got devices=0", "1 at least"),
    "half a device": ("devices = 4", "devices = 0.5", "my.toml: got devices=0.5", "whole number"),
    "no network cards": ("devices = 4", "devices = 4\nrails = 0", "my.toml: got rails=0", "1 at least"),
    "a negative price": ("price = 2", "price = -2", "my.toml: got price=-2", "0 at least"),
    "too many hosts": ("devices = 4", "devices = 4\nhosts = 100_000", "my.toml: got hosts=100000", "65536"),
    "a number for a table": ("[device]\nflops = 1e12\nbandwidth = 1e11", "device = 3", r"\[device\]: got 3", "table"),
    "no name": ('name = "box"', "", "my.toml: misses name", "name = ..."),
    "no TOML": ("[inner]", "[inner", "my.toml is no TOML: .* line", "dgx-h100.toml"),
    "no text": ("[inner]", "\udcff", "my.toml is no TOML: .*utf-8", "dgx-h100.toml"),
    "no end": ("[inner]", f"a = {'[' * 9999}", "my.toml is no TOML", "dgx-h100.toml"),
    "a large file": ("[inner]", "#" * 70_000, "my.toml has more than 64 KiB", "one thing"),
}


@pytest.mark.parametrize(("old", "new", "message", "fix"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_file_is_told_where_and_what_works(tmp_path, old, new, message, fix):
    assert old in GOOD
    (tmp_path / "my.toml").write_bytes(GOOD.replace(old, new, 1).encode(errors="surrogateescape"))
    with pytest.raises(ArgumentError, match=message) as caught:
        ht.plan.cluster(tmp_path / "my.toml")
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("dgx_h100", "no cluster 'dgx_h100'", "did you mean 'dgx-h100'? (or pass the path of a .toml file)"),
        ("tpu", "no cluster 'tpu'", "known names: cpu-host, dgx-a100, dgx-h100, dgx-h200 (or"),
        ("", "no cluster ''", "known names"),
        ("a\nb", "no cluster 'a.*b'", "known names"),
        ("../dgx-h100", "no cluster", "dgx-h100"),
        ("dgx-h100:0", "'0' hosts", "dgx-h100:16"),
        ("dgx-h100:many", "'many' hosts", "dgx-h100:16"),
        ("dgx-h100:", "'' hosts", "dgx-h100:16"),
        ("dgx-h100:9999999999", "'9999999999' hosts", "dgx-h100:16"),
        ("none.toml:2", "none.toml: No such file", "path of a .toml file"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_told_what_there_is(text, message, fix):
    with pytest.raises(ArgumentError, match=message) as caught:
        ht.plan.cluster(text)
    assert fix in caught.value.fix
