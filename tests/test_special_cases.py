"""Special values: every cell of the tables in `tutorials/guides/special_values.md`, in all ways a result is made."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import array_api_strict
import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS, Node
from hetu.core.kernels import kernels_of
from hetu.core.types import as_dtype

from .at_once import compiled_at_once

PAGE = Path(__file__).parent.parent / "tutorials/guides/special_values.md"
FLOATS = ("float32", "float64", "float16", *(["bfloat16"] if find_spec("ml_dtypes") else []))
SIGNED, UNSIGNED = (tuple(f"{kind}{bits}" for bits in (8, 16, 32, 64)) for kind in ("int", "uint"))
DTYPES = {  # of tables, by their first cell
    "floats": FLOATS,
    "signed": SIGNED,
    "unsigned": UNSIGNED,
    "integers": SIGNED + UNSIGNED,
    "booleans": ("bool",),
    "gradients": FLOATS,
}
EVERY = (*FLOATS, *SIGNED, *UNSIGNED, "bool")
SHAPES = ((), (1,), (7,), (40,))  # one number twice, the rest of a vector alone, and whole vectors with a rest
WORDS = {"NaN": np.nan, "∞": np.inf, "-∞": -np.inf, "true": 1, "false": 0}

both_meanings = pytest.mark.parametrize("kernels", ["0", "1"], ids=["plain", "kernels"])
each_dtype = pytest.mark.parametrize("dtype", EVERY)


# -- the page --------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """`name` of an operator with its attributes, and words: of its operands, and of what it gives."""

    name: str
    operands: tuple[str, ...]
    result: str


def parts(words: str) -> tuple[str, ...]:
    """Words between commas; a list in brackets is one."""
    return tuple(re.findall(r"\[.*?\]|[^, ]+", words))


def cells(line: str) -> list[str]:
    return [cell.strip(" *") for cell in line.strip("|").split("|")]


@cache
def tables() -> dict[str, list[Case]]:
    """The cases by what stands in the first cell of their table. That of a matrix is the operator of all."""
    found: dict[str, list[Case]] = {}
    for block in re.findall(r"(?:^\|.*\n)+", PAGE.read_text("utf-8"), re.M):
        (kind, *heads), _, *rows = map(cells, block.splitlines())
        for first, *row in rows:
            if heads[0] == "operands":
                found.setdefault(kind, []).append(Case(first, parts(row[0]), row[1]))
                continue
            for head, result in zip(heads, row, strict=True):
                of = (kind, (first, head)) if kind in OPS else (first, parts(head))
                found.setdefault("floats" if kind in OPS else kind, []).append(Case(*of, result))
    return found


def cases(dtype: str, lists: bool, errors: bool = False) -> list[Case]:
    """Those of values of a dtype: of arrays in brackets or of elements."""
    found = [c for kind, dtypes in DTYPES.items() if dtype in dtypes and kind != "gradients" for c in tables()[kind]]
    return [c for c in found if c.result.endswith("Error") is errors and is_list(c) is lists]


def is_list(case: Case) -> bool:
    return case.operands[0].startswith("[")


@cache
def function(name: str) -> Callable[..., Node]:
    """What `clip(-1, 2)` names: the operator, or function of hetu, with these attributes by position."""
    made, attrs = re.fullmatch(r"(\w+)(?:\((.*)\))?", name).groups()
    op: Any = OPS.get(made) or getattr(ht, made)
    values = [w if w[0].isalpha() else float(w) for w in parts(attrs or "")]
    return lambda *operands, **more: op(*operands, *values, **more)


def number(word: str, dtype: np.dtype) -> Any:
    if word in ("min", "max"):
        return int(getattr(np.iinfo(dtype), word))
    return WORDS[word] if word in WORDS else float(word)


def array(words: Iterable[str], dtype: np.dtype) -> np.ndarray:
    return np.array([number(w, dtype) for w in words], dtype)


def agree(got: np.ndarray, word: str, dtype: np.dtype) -> np.ndarray:
    """Where numbers are what a word says; `dtype` is that of which `max` is the largest."""
    if word == "any":
        return np.ones(got.shape, bool)
    if got.dtype.kind in "iub" and word not in ("…", "±0"):
        return got == number(word, dtype)
    got = got.astype(np.float64)
    if word in ("…", "±0"):
        return np.isfinite(got) & ((got == 0) | (word == "…"))
    right = number(word, dtype)
    signs = np.signbit(got) == np.signbit(right)
    return np.isclose(got, right, rtol=1e-3, atol=0, equal_nan=True) & (signs | (right != 0))


def check(got: Any, words: Any, dtype: np.dtype, shown: str) -> None:
    """`words` say what each of the numbers is."""
    got, words = np.asarray(got), np.asarray(words)
    for word in np.unique(words):
        here = words == word
        right = agree(got[here], word, dtype)
        assert right.all(), f"{shown}: got {got[here][~right][0]}, wanted {word}"


def test_what_the_standard_names_and_hetu_has_is_on_the_page():
    kinds = tuple(f"_{kind}_functions" for kind in ("elementwise", "statistical", "searching", "sorting", "utility"))
    named = {
        n for n, f in vars(array_api_strict).items() if getattr(f, "__module__", None) and f.__module__.endswith(kinds)
    }
    assert len(named) > 70
    ours = {{"pow": "power", "cumulative_sum": "cumsum"}.get(name, name) for name in named}
    shown = {c.name.partition("(")[0] for found in tables().values() for c in found}
    assert {name for name in ours if name in OPS or name in ht.__all__} - shown == {"where"}  # whose values only pass


# -- elements --------------------------------------------------------------------------------------------------------


class Grid(NamedTuple):
    """Operands, each in words and as an array, and what functions give of all of them: `any` where a table has none."""

    dtype: np.dtype
    words: tuple[tuple[str, ...], ...]
    arrays: tuple[np.ndarray, ...]
    results: Mapping[str, np.ndarray]

    def placeholders(self, shapes: Sequence[tuple[int, ...]]) -> list[Node]:
        return [ht.placeholder(f"x{k}", shape, self.dtype) for k, shape in enumerate(shapes)]

    def applied(self, *operands: Node) -> dict[str, Node]:
        return {name: function(name)(*operands) for name in self.results}


def grids(dtype: str) -> Iterator[Grid]:
    """Functions of one number and of two; those that refuse some operands by themselves."""
    found, refusing = cases(dtype, lists=False), {c.name for c in cases(dtype, lists=False, errors=True)}
    kinds: dict[Any, list[Case]] = {}
    for c in found:
        kinds.setdefault((len(c.operands), c.name in refusing and c.name), []).append(c)
    for (arity, _), mine in kinds.items():
        operands = dict.fromkeys(c.operands for c in mine)
        if dtype in FLOATS:  # in all pairs
            words = dict.fromkeys(w for pair in operands for w in pair)
            operands = dict.fromkeys(itertools.product(words, repeat=arity))
        words, own = tuple(zip(*operands)), as_dtype(dtype)
        place, results = {pair: k for k, pair in enumerate(operands)}, {}
        for c in mine:
            results.setdefault(c.name, np.full(len(place), "any", object))[place[c.operands]] = c.result
        yield Grid(own, words, tuple(array(w, own) for w in words), results)


class Trial(NamedTuple):
    """What a program fetches, by names of functions, what it is fed in turn, and the words for what it gives."""

    way: str
    nodes: dict[str, Node]
    feeds: list[dict[Node, np.ndarray]]
    results: Mapping[str, np.ndarray]

    def executor(self) -> ht.Executor:
        return ht.Executor([*self.nodes.values()])

    def lower(self) -> None:
        self.executor().program(self.feeds[0])

    def check(self, dtype: np.dtype) -> None:
        executor = self.executor()
        runs = [executor.run(feed) for feed in self.feeds]
        for name, *values in zip(self.nodes, *runs, strict=True):
            check(np.array(values), self.results[name], dtype, f"{name} of {dtype}, {self.way}")


def rolled(g: Grid, shape: tuple[int, ...]) -> Trial:
    """Each of the operands at each place of arrays of a shape."""
    count, size = len(g.words[0]), int(np.prod(shape))
    places = np.array([((np.arange(size) + shift) % count).reshape(shape) for shift in range(count)])
    nodes = g.placeholders([shape] * len(g.arrays))
    feeds = [{n: np.asarray(a[p]) for n, a in zip(nodes, g.arrays)} for p in places]
    results = {name: words[places] for name, words in g.results.items()}
    return Trial(f"at every place of {shape}", g.applied(*nodes), feeds, results)


def crossed(g: Grid) -> Trial:
    """A column and a row broadcast."""
    known = [*dict.fromkeys(g.words[0])]
    nodes, line = g.placeholders([(len(known), 1), (len(known),)]), array(known, g.dtype)
    results = {name: words.reshape(1, len(known), -1) for name, words in g.results.items()}
    return Trial("broadcast", g.applied(*nodes), [dict(zip(nodes, (line[:, None], line)))], results)


def folded(g: Grid) -> Trial:
    results = {name: words[None] for name, words in g.results.items()}
    return Trial("of constants", g.applied(*map(ht.constant, g.arrays)), [{}], results)


def beside_a_number(g: Grid, word: str, first: bool) -> Trial:
    """One operand is a constant, which may make the operator a simpler one."""
    known = [*dict.fromkeys(g.words[0])]
    (x,), c = g.placeholders([(len(known),)]), ht.constant(array([word], g.dtype).reshape(()))
    place = {pair: k for k, pair in enumerate(zip(*g.words))}
    pairs = [(word, w) if first else (w, word) for w in known]
    made = {n: [[simplified(n, p, 1 - first, words[place[p]]) for p in pairs]] for n, words in g.results.items()}
    way = f"{'first' if first else 'second'} a constant {word}"
    return Trial(way, g.applied(*((c, x) if first else (x, c))), [{x: array(known, g.dtype)}], made)


def simplified(name: str, operands: tuple[str, str], known: int, result: str) -> str:
    """What the page says of known zeros beside what is not known."""
    for case in tables()["constants"]:
        at = case.operands.index("x")
        if case.name == name and known == 1 - at and operands[known] in ("0", "-0"):
            x = operands[at]
            negative = "NaN" if x == "NaN" else x[1:] if x[0] == "-" else f"-{x}"
            return {"x": x, "-x": negative}.get(case.result, case.result)
    return result


def trials(dtype: str) -> Iterator[Trial]:
    for g in grids(dtype):
        yield from (rolled(g, shape) for shape in SHAPES)
        yield folded(g)
        if len(g.words) == 2 and dtype in FLOATS:
            yield crossed(g)
            yield from (beside_a_number(g, *way) for way in itertools.product({*g.words[0]}, (True, False)))


def run_all(made: Sequence[Trial], dtype: str) -> None:
    compiled_at_once(t.lower for t in made)
    for trial in made:
        trial.check(as_dtype(dtype))


@both_meanings
@each_dtype
@pytest.mark.sampled(8)
def test_elements_in_programs(dtype, kernels, monkeypatch):
    monkeypatch.setenv("HETU_KERNELS", kernels)
    run_all([*trials(dtype)], dtype)


def bound(node: Node, arrays: Sequence[np.ndarray], over: int | None) -> np.ndarray:
    """What an operator by itself writes: into a new array, or over an operand."""
    copies = [a.copy() for a in arrays]
    out = np.full(node.shape, 7, node.dtype) if over is None else copies[over]
    with np.errstate(all="ignore"):
        for call in kernels_of(np).joined(node.op.bound(np, out, copies, node.attrs)):
            call()
    return out


def alone(dtype: str) -> Iterator[tuple[str, Callable[[], np.ndarray], np.ndarray]]:
    """Each operator by itself, and where its result goes over an operand."""
    for g in grids(dtype):
        for name, words in g.results.items():
            node = function(name)(*g.placeholders([a.shape for a in g.arrays]))
            over = node.op.inplace.get(0, ()) if node.dtype == g.dtype else ()
            for at in (None, *over[: len(g.arrays)]):
                yield f"{name} of {dtype}, over operand {at}", partial(bound, node, g.arrays, at), words


@pytest.mark.sampled(8)
@both_meanings
@each_dtype
def test_elements_alone(dtype, kernels, monkeypatch):
    monkeypatch.setenv("HETU_KERNELS", kernels)
    made = [*alone(dtype)]
    compiled_at_once(run for _, run, _ in made)
    for shown, run, words in made:
        check(run(), words, as_dtype(dtype), shown)


@each_dtype
def test_the_plain_meaning_of_elements(dtype):
    for g in grids(dtype):
        for name, words in g.results.items():
            check(ht.evaluate(function(name)(*g.arrays)), words, g.dtype, f"{name} of {dtype}")


def test_known_zeros_beside_known_numbers_are_computed():
    """Before the rules for zeros beside what is not known; a large zero has a sign, too."""
    (g,) = (g for g in grids("float32") if len(g.words) == 2)
    for pair, *operands in zip(zip(*g.words), *g.arrays):
        if "0" in pair or "-0" in pair:
            made = g.applied(*(ht.constant(np.array(x)) for x in operands))
            words = {name: found[[*zip(*g.words)].index(pair)] for name, found in g.results.items()}
            for name, got in zip(made, ht.Executor([*made.values()], passes=["simplify"]).run(), strict=True):
                check([got], [words[name]], g.dtype, f"{name} of {pair}")
    large = ht.full((1 << 20,), 0.0)
    assert np.signbit(ht.Executor([-large], passes=["simplify"]).run()[0]).all()


# -- axes ------------------------------------------------------------------------------------------------------------


def folds(dtype: str, size: int) -> Iterator[Trial]:
    """Each list at each place of a longer one, which its last number fills: as rows, as columns, and by itself."""
    found = [c for c in cases(dtype, lists=True) if c.result[0] != "[" and c.operands != ("[]",)]
    lists = {c.operands: parts(c.operands[0][1:-1]) for c in found}
    rows = {(k, s): np.roll((*w, *w[-1:] * (size - len(w))), s) for k, w in lists.items() for s in range(size)}
    at = {row: k for k, row in enumerate(rows)}
    results = {c.name: np.full(len(rows), "any", object) for c in found}
    for c, shift in itertools.product(found, range(size)):
        place = c.name.startswith("arg") and c.result.isdigit()
        results[c.name][at[c.operands, shift]] = str((int(c.result) + shift) % size) if place else c.result
    numbers = np.array([array(row, as_dtype(dtype)) for row in rows.values()])
    x, y, z = (ht.placeholder("x", s, dtype) for s in (numbers.shape, numbers.T.shape, (size,)))
    at_once = {name: words[None] for name, words in results.items()}
    yield Trial(f"rows of {size}", applied(results, x, axis=1), [{x: numbers}], at_once)
    yield Trial(f"columns of {size}", applied(results, y, axis=0), [{y: numbers.T}], at_once)
    split = {name: OPS[name].decompose_rule for name in results if name in OPS and OPS[name].decompose_rule}
    made = {name: rule(x, axis=1, keepdims=False) for name, rule in split.items()}
    yield Trial("in parts", made, [{x: numbers}], at_once)
    yield Trial("of constants", applied(results, ht.constant(numbers), axis=1), [{}], at_once)
    yield Trial(f"{size} numbers", applied(results, z), [{z: row} for row in numbers], results)


def applied(names: Iterable[str], x: Any, **attrs: Any) -> dict[str, Node]:
    return {name: function(name)(x, **attrs) for name in names}


def as_they_are(dtype: str) -> Iterator[Trial]:
    """Empty lists, and those that give a list."""
    for c in cases(dtype, lists=True):
        values = array(parts(c.operands[0][1:-1]), as_dtype(dtype))
        x, words = ht.placeholder("x", values.shape, dtype), parts(c.result[1:-1]) if c.result[0] == "[" else c.result
        if c.result[0] == "[" or not values.size:
            yield Trial(c.operands[0], applied([c.name], x), [{x: values}], {c.name: np.array([words])})
            yield Trial("a constant", applied([c.name], values), [{}], {c.name: np.array([words])})


@both_meanings
@each_dtype
@pytest.mark.sampled(8)
def test_axes(dtype, kernels, monkeypatch):
    monkeypatch.setenv("HETU_KERNELS", kernels)
    run_all([*as_they_are(dtype), *(t for n in (7, 40) if dtype in FLOATS for t in folds(dtype, n))], dtype)


@both_meanings
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_of_matrices_multiply_every_pair(dtype, kernels, monkeypatch):
    monkeypatch.setenv("HETU_KERNELS", kernels)
    for size, word in itertools.product((1, 7, 40), ("NaN", "∞", "-∞")):
        a, b = np.ones((size, size), dtype), np.ones((size, size + 1), dtype)
        a[0, -1], b[-1, 1] = array([word, "0"], a.dtype)
        x, y = ht.placeholder("x", a.shape, dtype), ht.placeholder("y", b.shape, dtype)
        words = np.full((size, size + 1), "…", object)
        words[0], words[0, 1] = word, "NaN"
        for got in ht.Executor([x @ y, ht.einsum("ij,jk->ik", x, y), ht.linear(x, y, b[0])]).run({x: a, y: b}):
            check(got, words, a.dtype, f"{word} in {size} of {dtype}")


# -- attention -------------------------------------------------------------------------------------------------------

SEEN = np.tril(np.ones((6, 6), bool), 2) & (np.arange(6) != 1)
MASKS = {  # what hides keys, and which those are
    "none": ({}, np.ones((6, 6), bool)),
    "causal": ({"causal": True}, np.tri(6, dtype=bool)),
    "booleans": ({"mask": SEEN}, SEEN),
    "floats": ({"mask": np.where(SEEN, 0.5, -np.inf)}, SEEN),
}
LARGE = (1, 400, 3000)  # of queries and keys: scores reach 2e6, which float16 does not hold


@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("dtype", [d for d in FLOATS if d.endswith("16")])
@both_meanings
def test_attention_whose_scores_are_beyond_its_dtype(masked, dtype, kernels, monkeypatch):
    """Results are those of float32 rounded at the end, their gradients finite; a key that is hidden counts for nothing.

    Most scores are negative, so that hidden keys would be the first to count.
    """
    monkeypatch.setenv("HETU_KERNELS", kernels)
    (given, seen), rng = MASKS[masked], np.random.default_rng(0)
    for large in LARGE:
        q, k, v = (rng.uniform(0.5, 1, (2, 6, 8)) * by for by in (large, -large, 1))
        arrays = [a.astype(as_dtype(dtype)) for a in (q, k, v)]
        q, k, v = (a.astype(np.float64) for a in arrays)
        scores = np.where(seen, q @ k.swapaxes(1, 2) / np.sqrt(8), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        nodes = [ht.placeholder(f"x{n}", a.shape, a.dtype) for n, a in enumerate(arrays)]
        y = ht.scaled_dot_product_attention(*nodes, **given)
        got, *slopes = ht.Executor([y, *ht.gradients(ht.sum(y), nodes)]).run(dict(zip(nodes, arrays)))
        right = weights @ v / weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(got.astype(np.float64), right, rtol=1e-3 if dtype == "float16" else 8e-3)
        assert all(np.isfinite(s.astype(np.float64)).all() for s in slopes)


# -- errors and gradients --------------------------------------------------------------------------------------------


@both_meanings
@each_dtype
def test_errors(dtype, kernels, monkeypatch):
    monkeypatch.setenv("HETU_KERNELS", kernels)
    for c in (*cases(dtype, lists=False, errors=True), *cases(dtype, lists=True, errors=True)):
        words = [parts(o[1:-1]) if o[0] == "[" else [o] for o in c.operands]
        arrays = [array(w, as_dtype(dtype)) for w in words]
        for operands in (arrays, [ht.placeholder(f"x{k}", a.shape, a.dtype) for k, a in enumerate(arrays)]):
            with pytest.raises(getattr(ht.errors, c.result)):
                ht.Executor([function(c.name)(*operands)]).run({n: a for n, a in zip(operands, arrays) if n is not a})


def slopes(dtype: str, size: int) -> Trial:
    """The gradients of the sums of all functions, of elements so often that they fill arrays of a size."""
    nodes, feed, results = {}, {}, {}
    for k, (name, operands, result) in enumerate(tables()["gradients"]):
        listed = operands[0][0] == "["
        given, wanted = ((w[1:-1] for w in words) if listed else words for words in (operands, parts(result)))
        arrays = [np.resize(array(parts(w), as_dtype(dtype)), len(parts(w)) if listed else size) for w in given]
        xs = [ht.placeholder(f"x{k}.{i}", a.shape, dtype) for i, a in enumerate(arrays)]
        feed |= dict(zip(xs, arrays))
        for x, g, words in zip(xs, ht.gradients(ht.sum(function(name)(*xs)), xs), wanted, strict=True):
            shown = f"slope in {x.name} of {name} at {operands}"
            signless = ["±0" if w == "0" else w for w in parts(words)]
            nodes[shown], results[shown] = g, np.resize(signless, (1, *x.shape))
    return Trial(f"{size} at once", nodes, [feed], results)


@pytest.mark.sampled(3)
@both_meanings
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients(dtype, kernels, monkeypatch):
    monkeypatch.setenv("HETU_KERNELS", kernels)
    run_all([slopes(dtype, size) for size in (1, 7, 40)], dtype)
