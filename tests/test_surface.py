"""What a user may call: the names of `ht.` and of its public packages, complete, explained and in the reference."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import hetu as ht
from hetu import ops
from hetu.core.graph import OPS
from hetu.core.op import Op

ROOT = Path(__file__).parent.parent
MOST = 186  # names; what adds one says so here, at last those of the array API: atan, and of bits
MODULES = {name: value for name in ht.__all__ if inspect.ismodule(value := getattr(ht, name))}
FAMILIES = {f"models.{name}": getattr(ht.models, name) for name in ht.models.__all__}
PACKAGES = {name: value for name, value in MODULES.items() if name != "models"} | FAMILIES
REFERENCE = {page.name: page.read_text("utf-8") for page in (ROOT / "tutorials/reference").glob("*.md")}
each_package = pytest.mark.parametrize("name", PACKAGES)


def is_own(name: str, value: object, module: ModuleType) -> bool:
    """Whether a name of a module is a class, function or operator that the module or its folder defines."""
    defined = inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, Op)
    inside = f"{getattr(value, '__module__', '')}.".startswith(f"{module.__name__}.")
    return defined and inside and not name.startswith("_")


@each_package
def test_an_editor_completes_to_what_is_public(name: str) -> None:
    assert sorted(dir(PACKAGES[name])) == sorted(PACKAGES[name].__all__)


def test_the_surface_is_what_dir_shows_and_stays_small() -> None:
    assert sorted(dir(ht)) == sorted(ht.__all__) and len(ht.__all__) == len(set(ht.__all__)) <= MOST
    assert [name for name in ht.__all__ if not hasattr(ht, name)] == []
    stars: dict[str, object] = {}
    exec("from hetu import *", stars)
    assert {name for name in stars if not name.startswith("_")} == set(ht.__all__)


def test_what_else_python_finds_are_loaded_modules_alone() -> None:
    """Python makes every imported module of the package an attribute, and IPython asks for one; none is public."""
    rest = {name: value for name, value in vars(ht).items() if name not in ht.__all__ and not name.startswith("_")}
    apart = [name for name, value in rest.items() if sys.modules.get(f"hetu.{name}") is not value]
    assert apart == ["load_ipython_extension"]


def test_operators_of_passes_and_gradients_are_not_on_the_surface() -> None:
    assert set(ops.__all__) < set(ht.__all__)
    inside = [op for op in OPS.values() if op.__module__.startswith(("hetu.ops.", "hetu.core."))]
    leaked = [op.name for op in inside if hasattr(ht, op.name) and op.name not in ht.__all__]
    assert leaked == [] and {"add", "conv2d_dw", "batch_norm_train"} <= {op.name for op in inside} - set(dir(ht))


def test_big_packages_are_loaded_when_first_touched() -> None:
    script = (
        "import sys, hetu as ht\n"
        "big = {'hetu.dist', 'hetu.ps', 'hetu.plan'}\n"
        "assert not big & set(sys.modules), 'importing hetu loads one of them'\n"
        "assert ht.ps.SSP(3) and 'hetu.plan' not in sys.modules\n"
        "assert ht.dist.DataParallel and ht.plan.auto and big <= set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, check=True, timeout=60)


@each_package
def test_a_package_names_all_that_users_meet(name: str) -> None:
    module = PACKAGES[name]
    assert len(module.__all__) == len(set(module.__all__))
    assert [n for n in module.__all__ if not hasattr(module, n)] == []
    assert [n for n, value in vars(module).items() if is_own(n, value, module) and n not in module.__all__] == []


@pytest.mark.parametrize("name", [name for name in ht.__all__ if name not in MODULES])
def test_a_name_is_explained_with_an_example(name: str) -> None:
    assert ">>>" in (inspect.getdoc(getattr(ht, name)) or "")
    assert any(f"\n### {name}\n\n```text\nht.{name}" in text for text in REFERENCE.values())


@each_package
def test_a_package_is_explained_name_by_name(name: str) -> None:
    module = PACKAGES[name]
    assert module.__doc__ and any(f"\n## ht.{name}\n" in text for text in REFERENCE.values())
    for own in module.__all__:
        value = getattr(module, own)
        assert not is_own(own, value, module) or inspect.getdoc(value), own
        assert any(f"\n### {own}\n\n```text\nht.{name}.{own}" in text for text in REFERENCE.values()), own


@pytest.mark.parametrize("module", [ht, *PACKAGES.values()], ids=lambda m: m.__name__)
def test_a_misspelt_name_is_answered_with_one_that_exists(module: ModuleType) -> None:
    name = max(module.__all__, key=len)
    with pytest.raises(ht.errors.UnknownNameError, match=f"{module.__name__} has no '{name}_'") as caught:
        getattr(module, f"{name}_")
    assert name in caught.value.fix


def test_the_reference_has_nothing_else() -> None:
    """The passes apart, which are called by their names."""
    shown = [name for text in REFERENCE.values() for name in re.findall(r"^```text\nht\.([\w.]+)", text, re.M)]
    wanted = [n for n in ht.__all__ if n not in MODULES]
    wanted += [f"{name}.{own}" for name, module in PACKAGES.items() for own in module.__all__]
    assert sorted(shown) == sorted(wanted)


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("programs.md", "Executor: run predict value save load; History: best; Profile: table; Checkpoints: save wait"),
        ("data.md", "ArrayDataset: split flat; TextData: encode decode windows; Accuracy: update; Metric: result"),
        ("optimizers.md", "Optimizer: minimize apply slot; Average: follow of; Plateau: update"),
        ("scripts.md", "Generator: generate; Script: parse batches fit"),
    ],
)
def test_a_class_is_shown_with_its_methods(path: str, methods: str) -> None:
    entries = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", REFERENCE[path], re.M | re.S))
    for row in methods.split("; "):
        cls, _, names = row.partition(": ")
        assert set(names.split()) <= set(re.findall(r"^\| `\.(\w+)\(", entries[cls], re.M)), cls


def test_every_name_that_the_sources_tell_users_to_call_exists() -> None:
    sources = {path: path.read_text("utf-8") for path in (ROOT / "hetu").rglob("*.py")}
    called = {(name, path.name) for path, text in sources.items() for name in re.findall(r"\bht\.([a-z]\w*)\b", text)}
    assert sorted((name, path) for name, path in called if name not in ht.__all__) == []


# what hetu hands to users, what writers of operators, layers and passes call, and contexts, which Python calls
MADE = {
    "Graph",
    "History",
    "Node",
    "Profile",
    "State",
    "Updates",
    "OptimizerOptions",
    "RateSchedule",
    "Dataset",
    "Entries",
}
MADE |= {
    *"Entries GraphData GraphPart Neighborhood TextData".split(),
    *"Role op recompute rewrite scope tagged update_rule with_updates".split(),
}


def calls() -> Iterator[tuple[str, Callable]]:
    """The functions, classes and operators of `ht.` and of the packages that models are made of."""
    for package in ("ht", "nn", "optim", "schedules", "data", "metrics"):
        module = ht if package == "ht" else PACKAGES[package]
        for name in module.__all__:
            if callable(value := getattr(module, name)) and name not in MADE:
                yield f"{package}.{name}", value


@pytest.mark.parametrize(("name", "function"), [*calls()], ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_user_calls_answers_an_argument_that_it_does_not_take(name: str, function: Callable) -> None:
    with pytest.raises(ht.errors.HetuError, match=r"at test_surface\.py"):
        function(no_such_argument=1)


LAYERS = [ht.nn.Linear(3, 4), ht.nn.LSTM(3, 4), ht.nn.Sequential(ht.relu), ht.nn.BatchNorm(3), ht.nn.Dropout(0.5)]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_a_layer_answers_an_argument_that_it_does_not_take(layer: ht.nn.Layer) -> None:
    with pytest.raises(ht.errors.ArgumentError, match=f"{type(layer).__name__} takes no 'training'"):
        layer(ht.placeholder("x", (2, 5, 3)), training=True)
