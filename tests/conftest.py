"""One BLAS thread per test worker: several workers share the cores, and OpenBLAS's threads spin while they wait.

What tests compile is kept beside what pytest keeps, from run to run, and not in the user's home. Python keeps what it
compiles, whatever the environment says: hundreds of processes start, and each would compile the package anew. Ctrl-C
is Python's own for all, also where a suite runs in the background of a script, whose children are told to ignore it.
How long an example of a property takes is no failure: it depends on what else the machine does.
"""

import gc
import itertools
import os
import shutil
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("XDG_CACHE_HOME", str(Path(__file__).parent.parent / ".pytest_cache" / "compiled"))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
signal.signal(signal.SIGINT, signal.default_int_handler)
slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("untimed", hypothesis.settings(), deadline=None, suppress_health_check=slow)
hypothesis.settings.load_profile("untimed")


QUICK_CC = "cc -O0"
# Rooms of whose tests by several choices, each a `parametrize`, the usual run has each choice once, not their product.
PRODUCTS = {"cpu_kernels", "dist", "fuse", "ml", "plan", "ps", "strategies"}
# Rooms about what is sent and planned, which is the same without kernels, whose compilers take much of the time.
MEANT = {"dist", "plan", "ps", "strategies"}
WAYS = {"plain": "0", "kernels": pytest.param("1", marks=pytest.mark.nightly)}


def room(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).parts[0]


def is_meant(test: pytest.Item | pytest.Function) -> bool:
    """Whether a test is of what is meant without kernels: in those rooms all but a few, elsewhere a few."""
    if test.get_closest_marker("kernels") or test.get_closest_marker("compiled"):
        return False
    return room(test.path) in MEANT or any("meaning" in mark.args for mark in test.iter_markers("usefixtures"))


@pytest.fixture(autouse=True, scope="module")
def meaning(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test of what is meant without kernels, and nightly with them; what its module keeps as well."""
    with pytest.MonkeyPatch.context() as patch:
        if way := getattr(request, "param", None):
            patch.setenv("HETU_KERNELS", way)
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Cases that are chosen by their ids are run, nightly ones too: who names one wants to see it.

    The usual run compiles C without optimizing, in a third of the time: no result depends on it.
    """
    if config.option.markexpr == "not nightly" and all("[" in argument for argument in config.args):
        config.option.markexpr = ""
    is_there = shutil.which("cc") and sys.platform != "darwin"  # where it may only offer to install one
    if config.option.markexpr == "not nightly" and is_there:
        os.environ.setdefault("HETU_CC", QUICK_CC)


@pytest.fixture(autouse=True, scope="module")
def optimized(request: pytest.FixtureRequest) -> Iterator[None]:
    """The rooms of tests that are about compiled code always have what users have."""
    with pytest.MonkeyPatch.context() as patch:
        if room(request.path) in {"cpu_kernels", "fuse"} and os.environ.get("HETU_CC") == QUICK_CC:
            patch.delenv("HETU_CC")
            if c_calls := sys.modules.get("hetu.cpu_kernels.c_calls"):  # which keeps what it has compiled
                for kept in (c_calls._walk, c_calls._own_threads):
                    kept.cache_clear()
        yield


@pytest.fixture(autouse=True, scope="module")
def named() -> Iterator[None]:
    """An operator that a test makes takes its name from none of another module's tests for longer than its own."""
    operators = import_module("hetu.core.graph").OPS
    before = dict(operators)
    yield
    operators.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is collected goes before the end, so no search for garbage looks at it: each would take 0.3 s.

    Later ones come a hundredth as often as usual: graphs are many objects, hardly one of which is garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(70_000)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Nightly cases that are not asked for are not made, which would take as long as all others.

    Pytest has no other name for the cases of a test than `_calls`.
    """
    if is_meant(metafunc.definition):
        metafunc.parametrize("meaning", WAYS.values(), ids=WAYS, indirect=True)
    yield
    calls = metafunc._calls
    if mark := metafunc.definition.get_closest_marker("sampled"):
        mark_left_out(metafunc.definition.nodeid, calls, mark.args[0])
    elif room(metafunc.definition.path) in PRODUCTS:
        mark_products([mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")], calls)
    if metafunc.config.option.markexpr == "not nightly":
        metafunc._calls = [call for call in calls if not is_nightly(call)] or calls[:1]


def is_nightly(call: Any) -> bool:
    return any(mark.name == "nightly" for mark in call.marks)


def mark_left_out(test: str, calls: Iterable[Any], every: int) -> None:
    """Of a test that is `sampled(n)` one case in n is run, chosen by its name, and one of each choice of more than n.

    One at least is run; the others are nightly.
    """
    cases = [call for call in calls if not is_nightly(call)]
    choices = [[(name, id(value)) for name, value in case.params.items()] for case in cases]
    count = Counter(itertools.chain(*choices))
    run = [zlib.crc32(f"{test}[{case.id}]".encode()) % every == 0 for case in cases]
    run[:1] = run[:1] if any(run) else [True]
    seen = {*itertools.chain(*itertools.compress(choices, run))}
    for case, chosen, is_run in zip(cases, choices, run):
        if is_run:
            continue
        if any(count[choice] > every and choice not in seen for choice in chosen):
            seen.update(chosen)
        else:
            case.marks.append(pytest.mark.nightly.mark)


def mark_products(choices: list[str | Sequence[str]], calls: Iterable[Any]) -> None:
    """Of a product of choices as many cases are run as the longest has, all in turn; the others are nightly."""
    names = [[name.strip() for name in of.split(",")] if isinstance(of, str) else [*of] for of in choices]
    cases = [call for call in calls if not is_nightly(call)]
    alone = {name for case in cases for name in case.params}.difference(*names)  # parameters of fixtures
    columns = [*names, *([name] for name in sorted(alone))]
    made = [[tuple(id(case.params.get(name)) for name in of) for of in columns] for case in cases]
    numbers = [{choice: place for place, choice in enumerate(dict.fromkeys(column))} for column in zip(*made)]
    turns = {tuple(turn % len(of) for of in numbers) for turn in range(max(map(len, numbers), default=1))}
    places = [tuple(of[choice] for of, choice in zip(numbers, case)) for case in made]
    seen = {*itertools.chain(*(enumerate(of) for of in places if of in turns))}
    for case, of in zip(cases, places):
        if of in turns:
            continue
        if {*enumerate(of)} <= seen:
            case.marks.append(pytest.mark.nightly.mark)
        else:  # a case is lacking that would have had it
            seen.update(enumerate(of))


EXAMPLES_OF_EXTRAS = {  # files whose examples need a package
    "hetu/onnx/load.py": "onnx",
    "hetu/onnx/save.py": "onnx",
    "hetu/pytorch/load.py": "torch",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        package = EXAMPLES_OF_EXTRAS.get(item.nodeid.partition("::")[0])
        if package and find_spec(package) is None:
            item.add_marker(pytest.mark.skip(reason=f"{package} is not installed"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("compiled") and import_module("hetu.cpu_kernels.compiler").compiler() is None:
        pytest.skip("there is no C compiler")
