"""The error function, and the normal distribution that follows from it.

Neither NumPy nor the array API standard has it: it is made of rational approximations in plain array arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import dtype_of, to_dtype
from ..core.types import DEFAULT_FLOAT
from .elementwise import exp, float_function, floats, negative, square

__all__ = ["erf"]


@float_function(code="y = erf(x)")
def erf(xp: ModuleType, x: Any) -> Any:
    """The error function, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x.

    >>> import hetu as ht
    >>> float(ht.evaluate(erf(0.0)))
    0.0
    """
    return error_function(xp, *floats(xp, x))


erf.grad(lambda g, y, x: g * (exp(negative(square(x))) * (2 / math.sqrt(math.pi))))


# float32: x P(x^2) / Q(x^2) on [-4, 4], where erf has reached 1 in that precision. Coefficients as in Eigen.
_SINGLE = (
    (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
     -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
    (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
     -1.42647390514189e-02),
)  # fmt: skip
# float64: W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23, 1969: near 0 as
# above, elsewhere 1 - exp(-x^2) P(x) / Q(x).
_NEAR = (
    (1.85777706184603153e-1, 3.16112374387056560e00, 1.13864154151050156e02, 3.77485237685302021e02,
     3.20937758913846947e03),
    (1.0, 2.36012909523441209e01, 2.44024637934444173e02, 1.28261652607737228e03, 2.84423683343917062e03),
)  # fmt: skip
_FAR = (
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e00, 6.61191906371416295e01,
     2.98635138197400131e02, 8.81952221241769090e02, 1.71204761263407058e03, 2.05107837782607147e03,
     1.23033935479799725e03),
    (1.0, 1.57449261107098347e01, 1.17693950891312499e02, 5.37181101862009858e02, 1.62138957456669019e03,
     3.29079923573345963e03, 4.36261909014324716e03, 3.43936767414372164e03, 1.23033935480374942e03),
)  # fmt: skip


# float32: h(a) = exp(-a^2 / 2) P(a) / Q(a) is the probability of a normal number above a >= 0, fitted to 1e-7.
_TAIL = (
    (0.041536681444546794, 0.2188918162633758, 0.5000000913087763),
    (0.10252261102575415, 0.5688746496351509, 1.235680536882705, 1.0),
)


def error_function(xp: ModuleType, x: Any) -> Any:
    """erf of a float array, within 5e-7 in float32 and 1e-15 in float64; half precision goes through float32."""
    if dtype_of(x) == np.float64:
        return _erf_double(xp, x)
    z = xp.clip(to_dtype(xp, x, DEFAULT_FLOAT), -4.0, 4.0)
    y = _ratio(z * z, *_SINGLE)
    y *= z
    return to_dtype(xp, y, dtype_of(x))


def normal_distribution(xp: ModuleType, x: Any) -> tuple[Any, Any]:
    """The probability of a standard normal number below x, and exp(-x^2 / 2), for a float array of at least 32 bits."""
    bell = x * x
    bell *= -0.5
    bell = xp.exp(bell)
    if dtype_of(x) == np.float64:
        return (_erf_double(xp, x * math.sqrt(0.5)) + 1) * 0.5, bell
    y = _ratio(xp.minimum(xp.abs(x), 14.0), *_TAIL)  # beyond 14 the bell is 0, and far beyond the ratio overflows
    y *= bell
    y = xp.copysign(0.5 - y, x)
    y += 0.5
    return y, bell


def _erf_double(xp: ModuleType, x: Any) -> Any:
    size = xp.minimum(xp.abs(x), 6.0)  # beyond 6 the distance to 1 is below the precision
    square_ = size * size
    near = size * _ratio(square_, *_NEAR)
    far = 1.0 - xp.exp(-square_) * _ratio(size, *_FAR)
    return xp.copysign(xp.where(size < 0.46875, near, far), x)


def _ratio(x: Any, upper: Sequence[float], lower: Sequence[float]) -> Any:
    y = polynomial(x, upper)
    y /= polynomial(x, lower)
    return y


def polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """Horner's rule, highest power first, in one array."""
    first, *rest = coefficients
    y = x * first
    for c in rest[:-1]:
        y += c
        y *= x
    y += rest[-1]
    return y
