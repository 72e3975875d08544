"""The functions of the prelude: how far they are from the truth at every exponent; all compilers give the same bits."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hetu.cpu_kernels import compiler
from hetu.cpu_kernels.compiled import CONTRACT, build, source

from .every_compiler import commands

pytestmark = pytest.mark.compiled
Function = Callable[[np.ndarray], np.ndarray]

# How far a float may lie from the truth, in units of the last place (those of the least normal number and of all below
# it are 2^-149), and what computes the truth for doubles.
FUNCTIONS: dict[str, tuple[float, Function]] = {
    "exp": (1.0, np.exp),
    "expm1": (1.7, np.expm1),
    "log": (0.9, np.log),
    "log1p": (1.5, np.log1p),
    "tanh": (1.4, np.tanh),
    "erf": (1.3, np.vectorize(math.erf, otypes=[float])),
    "erfc": (4.7, np.vectorize(math.erfc, otypes=[float])),
    "sqrt": (0.5, np.sqrt),
    "rsqrt": (1.5, lambda x: 1 / np.sqrt(x)),
    "sin": (0.55, np.sin),
    "cos": (0.55, np.cos),
    "fabs": (0.0, np.fabs),
    "floor": (0.0, np.floor),
    "ceil": (0.0, np.ceil),
    "rint": (0.0, np.rint),
}
DOUBLES = 2.0  # units by which doubles may differ from NumPy's
PAIRS: dict[str, tuple[float, Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "pow": (0.6, np.power),
    "fmax": (0.0, np.maximum),
    "fmin": (0.0, np.minimum),
}
EXPRESSIONS = {name: f"{name}(x[i])" for name in FUNCTIONS} | {name: f"{name}(x[i], z[i])" for name in PAIRS}
EXPRESSIONS |= {"sum": "x[i] * z[i] + x[i]", "quotient": "x[i] / z[i]", "gelu_slope": "gelu_slope(x[i])"}
TEXT = """
void of_%s(const Word* a, long long first, long long last, char* scratch) {
    const T *x = a[0].p, *z = a[1].p;
    T* y = a[2].p;
    EACH for (long long i = first; i < last; i++) y[i] = %s;
}
"""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def numbers() -> np.ndarray:
    """Floats of every exponent, denormals, infinities and NaNs among them, and many where functions bend."""
    rng = np.random.default_rng(0)
    ends = np.concatenate([[0, 1, 2**22, 2**23 - 1], rng.integers(0, 2**23, 28)])
    bits = (np.arange(512)[:, None] << 23 | ends).astype(np.uint32)
    dense = [rng.uniform(low, high, 20_000) for low, high in ((-1, 1), (-12, 12), (-104, 90), (0.5, 1.5))]
    far = [float.fromhex("0x1.e90908p-2")]  # where erfc is farthest from the truth, of all floats from 1/4 to 1
    return np.concatenate([bits.view(np.float32).ravel(), far, *dense]).astype(np.float32)


def computed(name: str, x: np.ndarray, z: np.ndarray, contract: bool = False) -> np.ndarray:
    """An expression of two arrays, from a library that has them all."""
    names = "#define T double\n" if x.dtype == np.float64 else "#define T float\n"
    made = source(names + (CONTRACT if contract else "") + "".join(TEXT % row for row in EXPRESSIONS.items()))
    assert made is not None and build([made])
    y = np.empty_like(x)
    words = np.array([array.ctypes.data for array in (x, z, y)])
    function = made.function(f"of_{name}")
    function(ctypes.c_void_p(words.ctypes.data), ctypes.c_longlong(0), ctypes.c_longlong(x.size), None)
    return y


def distance(found: np.ndarray, truth: np.ndarray) -> float:
    """The greatest distance in units of the last place; infinite where one is no number or of another sign."""
    rounded = truth.astype(found.dtype)
    unit = np.spacing(np.abs(rounded))
    far = np.abs(found.astype(truth.dtype) - truth) / unit
    far = np.where(np.isfinite(rounded) & np.isfinite(found), far, np.inf)
    same = (found == rounded) & (np.signbit(found) == np.signbit(rounded))
    far = np.where((same & ~np.isfinite(rounded)) | (np.isnan(found) & np.isnan(rounded)), 0.0, far)
    return float(np.where((rounded == 0) & (found == 0) & ~same, np.inf, far).max())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("contract", [False, True], ids=["as written", "contracted"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_within_its_bound(name: str, contract: bool) -> None:
    bound, truth = FUNCTIONS[name]
    x, doubles = numbers(), np.random.default_rng(1).standard_normal(1000) * 4
    assert distance(computed(name, x, x, contract), truth(x.astype(np.float64))) <= bound
    assert distance(computed(name, doubles, doubles, contract), truth(doubles)) <= DOUBLES


@pytest.mark.parametrize("name", PAIRS)
def test_a_function_of_two_numbers_is_within_its_bound(name: str) -> None:
    bound, truth = PAIRS[name]
    x = numbers()
    z = np.random.default_rng(2).permutation(x)
    ends = np.array([0, 0.5, 1, 2, 3, np.inf, np.nan, 1e-45, 3e38], np.float32)
    bases, powers = np.meshgrid([*ends, *-ends], [*ends, *-ends])
    x, z = (np.concatenate([a, b.ravel()]).astype(np.float32) for a, b in ((x, bases), (z, powers)))
    some = (x != 0) | (z != 0)  # of two zeros, the sign is open
    x, z = x[some], z[some]
    assert distance(computed(name, x, z), truth(x.astype(np.float64), z.astype(np.float64))) <= bound


@pytest.mark.parametrize("found", [1.0 + 2**-22, np.nan, np.inf, -1.0])
def test_a_distance_is_seen(found: float) -> None:
    assert distance(np.array([found], np.float32), np.array([1.0])) >= 2
    assert distance(np.array([-0.0], np.float32), np.array([0.0])) == np.inf


def test_all_compilers_and_vectors_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers()
    z = np.random.default_rng(2).permutation(x)
    expected = {name: computed(name, x, z) for name in EXPRESSIONS}
    for command in commands():
        monkeypatch.setenv(compiler.SETTING, command)
        for name, bits in expected.items():
            found = computed(name, x, z)
            same = (found.view(np.int32) == bits.view(np.int32)) | (np.isnan(found) & np.isnan(bits))
            assert same.all(), f"{command}: {EXPRESSIONS[name]} at {x[~same][:3]}"
