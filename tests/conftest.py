"""One BLAS thread per test worker: several workers share the cores, and OpenBLAS's threads spin while they wait.

What tests compile is kept beside what pytest keeps, from run to run, and not in the user's home. Python keeps what it
compiles, whatever the environment says: hundreds of processes start, and each would compile the package anew.
"""

import itertools
import os
import sys
import zlib
from collections import Counter, defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("XDG_CACHE_HOME", str(Path(__file__).parent.parent / ".pytest_cache" / "compiled"))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(params=["0", pytest.param("1", marks=pytest.mark.nightly)], ids=["plain", "kernels"])
def meaning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test of what is meant without kernels, whose compilers would take most of its time; nightly with them."""
    monkeypatch.setenv("HETU_KERNELS", request.param)


def pytest_configure(config: pytest.Config) -> None:
    """Cases that are chosen by their ids are run, nightly ones too: who names one wants to see it."""
    if config.option.markexpr == "not nightly" and all("[" in argument for argument in config.args):
        config.option.markexpr = ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is `sampled(n)` one case in n is run, chosen by its name, and one of each choice of more than n.

    The others are nightly.
    """
    tables = defaultdict[tuple[str, int], list[Any]](list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and item.get_closest_marker("nightly") is None:
            tables[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (_, every), cases in tables.items():
        choices = {case: [(name, id(value)) for name, value in case.callspec.params.items()] for case in cases}
        count = Counter(itertools.chain(*choices.values()))
        run = [case for case in cases if zlib.crc32(case.nodeid.encode()) % every == 0]
        seen = {*itertools.chain(*(choices[case] for case in run))}
        for case in cases:
            if case in run:
                continue
            if any(count[choice] > every and choice not in seen for choice in choices[case]):
                seen.update(choices[case])
            else:
                case.add_marker("nightly")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("compiled") and import_module("hetu.cpu_kernels.compiler").compiler() is None:
        pytest.skip("there is no C compiler")
