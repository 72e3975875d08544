"""The suite notices bugs: each of `planted.py`, planted alone, makes the tests fail that are there for it."""

from __future__ import annotations

from collections import Counter

import pytest

from hetu.gpu_kernels import emulator

from . import planted
from .planted import BUGS, FAILED, ROOT

NEEDS = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")


def test_there_are_bugs_of_many_kinds_all_over_the_kernels():
    kinds, files = Counter(b.kind for b in BUGS), {b.file for b in BUGS}
    kernels = {f.name for f in (ROOT / "hetu" / "gpu_kernels").glob("*.cu")}
    assert len(BUGS) >= 100 and len(kinds) >= 16 and min(kinds.values()) >= 2
    assert kernels - files <= {"matrices.cu"}, "no bug is planted there"


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: f"{b.kind}: {b.file}: {b.right}")
def test_a_bug_still_has_a_place(bug):
    text = (ROOT / "hetu" / "gpu_kernels" / bug.file).read_text("utf-8")
    assert bug.planted(text) != text


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return planted.copied(tmp_path_factory.mktemp("planted"))


@NEEDS
@pytest.mark.nightly
@pytest.mark.parametrize("tests", sorted({b.tests for b in BUGS}))
def test_without_a_bug_nothing_fails(tests, copy):
    ended = planted.run(copy, tests)
    assert ended.returncode == 0, ended.stdout[-3000:]


@NEEDS
@pytest.mark.nightly
@pytest.mark.parametrize("bug", BUGS, ids=lambda b: f"{b.kind}: {b.file}: {b.right}")
def test_a_bug_is_found(bug, copy):
    ended = planted.found(copy, bug)
    assert ended.returncode == FAILED, f"{bug.tests} did not notice:\n{ended.stdout[-3000:]}"
