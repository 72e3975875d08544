"""Names and keywords of other libraries: the table is large, each right side exists, and every error uses it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import hetu as ht
from hetu import elsewhere
from hetu.core.errors import UnknownNameError, did_you_mean

from .zoo.calls import packages, targets

GUIDES = Path(__file__).parent.parent / "tutorials/guides"
NAMES, KEYWORDS = elsewhere.names(), elsewhere.keywords()
OURS = re.compile(r"\bht(?:\.[A-Za-z_]\w*)+")


def exists(path: str) -> bool:
    """Whether `ht.nn.Linear` is there; what doesn't exist is told, so `hasattr` answers."""
    value: object = ht
    for name in path.split(".")[1:]:
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def options() -> set[str]:
    found: set[str] = set()
    for target in targets().values():
        try:
            found |= {*inspect.signature(target.function).parameters}
        except ValueError:  # of what Python itself wrote
            continue
    return found


def test_the_table_is_large_and_names_nothing_twice() -> None:
    assert len(NAMES) + len(KEYWORDS) >= 300 and len(KEYWORDS) >= 60
    lefts = [line.split()[0] for line in elsewhere.TABLE.read_text("utf-8").splitlines() if line and line[0] != "#"]
    assert len(lefts) == len(set(lefts))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", NAMES)
def test_what_a_name_is_here_exists(name: str) -> None:
    ours = OURS.findall(NAMES[name])
    assert ours or "heturun" in NAMES[name], NAMES[name]
    assert [path for path in ours if not exists(path)] == []


def test_every_name_is_answered_by_its_row_or_by_our_function_of_that_name() -> None:
    told = {}
    for name in (name for name in NAMES if not hasattr(ht, name)):
        with pytest.raises(UnknownNameError) as caught:
            getattr(ht, name)
        told[name] = str(caught.value)
    assert [name for name, said in told.items() if NAMES[name] not in said and "call the function" not in said] == []


def test_what_keywords_are_here_exists() -> None:
    known = options()
    assert [(name, word) for name, words in KEYWORDS.items() for word in words if word not in known] == []


def test_no_name_of_the_table_is_one_of_ours() -> None:
    """A name that exists is never missed where it exists; elsewhere it may be."""
    assert [name for name in NAMES if name in ht.__all__ and NAMES[name] == f"ht.{name}"] == []


@pytest.mark.parametrize(
    ("module", "name", "remedy"),
    [
        (ht, "no_grad", "it is a sub-graph of ht.Executor without updates"),
        (ht, "dataloader_op", "it is ht.data.DataLoader"),
        (ht, "gpu", 'it is ht.Executor(..., device="gpu") here'),
        (ht.nn, "Dense", "it is ht.nn.Linear here"),
        (ht.nn, "BatchNorm2d", "it is ht.nn.BatchNorm here"),
        (ht.optim, "SGDOptimizer", "it is ht.optim.SGD here"),
        (ht.data, "Dataloader", "it is ht.data.DataLoader here"),
        (ht.nn, "CrossEntropyLoss", "it is ht.softmax_cross_entropy here"),
        (ht.nn, "Parameter", "it is ht.variable here"),  # ht.ps has another thing of this name
        (ht, "LayerNorm", "it is ht.nn.LayerNorm"),
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(module: object, name: str, remedy: str) -> None:
    with pytest.raises(ht.errors.UnknownNameError) as caught:
        getattr(module, name)
    assert remedy in caught.value.fix


@pytest.mark.parametrize(
    ("name", "remedy"), [("backward", "ht.gradients(loss, variables)"), ("detach", "stop_gradient")]
)
def test_a_method_of_a_tensor_is_answered_with_ours(name: str, remedy: str) -> None:
    with pytest.raises(ht.errors.UnknownNameError) as caught:
        getattr(ht.placeholder("x", (2,)), name)
    assert remedy in caught.value.fix


def test_a_keyword_of_another_library_is_answered_with_that_of_ours_which_the_callable_takes() -> None:
    x = ht.placeholder("x", (2, 3))
    for call, ours in [
        (lambda: ht.optim.Adam(lr=0.1), "learning_rate"),
        (lambda: ht.optim.Adam(betas=(0.9, 0.999)), "beta1"),
        (lambda: ht.optim.Adam(eps=1e-8), "epsilon"),
        (lambda: ht.sum(x, dim=1), "axis"),
        (lambda: ht.sum(x, keepdim=True), "keepdims"),
        (lambda: ht.nn.Linear(in_features=3, out_features=4), "inputs"),
        (lambda: ht.nn.MaxPool2d(pool_size=2), "kernel_size"),
        (lambda: ht.nn.TransformerBlock(8, nhead=2), "num_heads"),
        (lambda: ht.schedules.cosine(0.1, T_max=10), "steps"),
        (lambda: ht.variable("w", requires_grad=False), "trainable"),
        (lambda: ht.Executor([x], ctx="gpu"), "device"),
        (lambda: ht.Executor([x]).run(feed_dict={x: [[1.0] * 3] * 2}), "feed"),
    ]:
        with pytest.raises(ht.errors.HetuError) as caught:
            call()
        assert f"did you mean {ours!r}?" in caught.value.fix, caught.value


def test_another_word_of_the_table_is_not_taken_for_a_keyword() -> None:
    assert did_you_mean("train", ["trian", "eval"]) == "did you mean 'trian'?"


@pytest.mark.parametrize("guide", ["from_pytorch.md", "from_hetu.md"])
def test_the_guides_agree_with_the_table(guide: str) -> None:
    """Where a row of a guide begins with one name of another library, what it says here is what the table says."""
    rows = re.findall(
        r"^\| `(?:[\w.]+\.)?(\w+)(?:\([^`|]*\))?` \| ([^|]*) \|", (GUIDES / guide).read_text("utf-8"), re.M
    )
    both = [(name, ours, NAMES[name]) for name, ours in rows if name in NAMES and OURS.search(ours)]
    assert len(both) >= 8
    apart = [row for row in both if not {*OURS.findall(row[1])} & {*OURS.findall(row[2])}]
    assert apart == []


def test_a_name_of_ours_is_found_wherever_it_is_typed() -> None:
    """Every public name, typed in every package that hasn't it."""
    rooms, asked = packages(), 0
    for name in sorted({name for module in rooms.values() for name in module.__all__}):
        for label, module in rooms.items():
            if name in module.__all__ or hasattr(module, name):  # a module also has what it is made of
                continue
            with pytest.raises(UnknownNameError) as caught:
                getattr(module, name)
            asked += 1
            if name in NAMES:  # by which other libraries call something else
                assert NAMES[name] in caught.value.fix
                continue
            (there,) = re.fullmatch(r"it is (ht[.\w]*)", caught.value.fix).groups()
            assert exists(there) and there.endswith(f".{name}"), (label, name, caught.value.fix)
    assert asked > 3000
