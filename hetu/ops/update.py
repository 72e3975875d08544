"""Update rules of optimizers: from a variable, its optimizer state and a gradient to their new values.

Each rule is a function of values like any other operator; the executor lets it write in place where the old values
die. Rates and step counts are scalars computed at run time, so a schedule costs no new program. The row forms
change only the rows that a batch looked up, in the parameter and in its optimizer state ("lazy": momentum does not
decay and Adam does not move where the gradient is zero). Ignored on purpose: gradient clipping and L2 decay, which
are graph functions of the gradient (see `optim.py`).
"""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.op import Instruction, Role, op
from ..core.types import TensorType
from .update_kernels import add_scaled, blocks, decay, negated, outputs_in_place, scaled_step, update_type
from .update_rows import row_form, subtract_rows


def _whole(x: TensorType, *types: TensorType, **_: Any) -> str:
    """Sharding rule of a rule that needs norms of the whole parameter: no axis may be split."""
    letters = "".join(f"{chr(ord('a') + i)}!" for i in range(x.ndim))
    return f"{letters},{letters},{letters},{letters},,->{letters},{letters},{letters}"


# -- the rules -------------------------------------------------------------------------------------------------


@op(role=Role.UPDATE, infer=update_type(1), dims="...,...,->...", inplace={0: (0,)}, differentiable=False)
def sgd(xp: ModuleType, p: Any, g: Any, lr: Any) -> Any:
    """Gradient descent: p - lr g.

    >>> import hetu as ht
    >>> ht.evaluate(sgd([1.0, 2.0], [10.0, 10.0], 0.1)).tolist()
    [0.0, 1.0]
    """
    return p - xp.asarray(lr, dtype=p.dtype) * g


@sgd.bind
def sgd_bind(xp: ModuleType, out: Any, p: Any, g: Any, lr: Any) -> list[Instruction] | None:
    if xp is not np:
        return None
    (new,), calls = outputs_in_place(out, (p,))
    minus, negate = negated(lr, p.dtype)
    calls += negate
    for p_, g_, s in blocks(new, g):
        calls += add_scaled(p_, g_, minus, s)
    return calls


@op(
    role=Role.UPDATE,
    infer=update_type(2),
    dims="...,...,...,->...,...",
    inplace={0: (0,), 1: (1,)},
    differentiable=False,
)
def momentum(
    xp: ModuleType, p: Any, v: Any, g: Any, lr: Any, *, momentum: float = 0.9, nesterov: bool = False
) -> tuple[Any, Any]:
    """Heavy ball: v' = momentum v + g, p' = p - lr v'. With `nesterov`, p' = p - lr (g + momentum v').

    B. Polyak, 1964; I. Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013,
    eq. 3-4, with the rate taken out of v (equal while the rate is constant). Returns (p', v').

    >>> import hetu as ht
    >>> p, v = momentum([1.0], [2.0], [1.0], 0.5, momentum=0.5)
    >>> ht.evaluate(p).tolist(), ht.evaluate(v).tolist()
    ([0.0], [2.0])
    """
    v = momentum * v + g
    direction = g + momentum * v if nesterov else v
    return p - xp.asarray(lr, dtype=p.dtype) * direction, v


@momentum.bind
def momentum_bind(
    xp: ModuleType, out: Any, p: Any, v: Any, g: Any, lr: Any, *, momentum: float, nesterov: bool
) -> list[Instruction] | None:
    if xp is not np:
        return None
    (new, velocity), calls = outputs_in_place(out, (p, v))
    minus, negate = negated(lr, p.dtype)
    calls += negate
    for p_, v_, g_, s in blocks(new, velocity, g):
        calls += decay(v_, g_, momentum, 1.0, s)
        if nesterov:
            calls += [partial(np.multiply, v_, v_.dtype.type(momentum), s), partial(np.add, s, g_, s)]
        calls += add_scaled(p_, s if nesterov else v_, minus, s)
    return calls


@op(
    role=Role.UPDATE,
    infer=update_type(2),
    dims="...,...,...,->...,...",
    inplace={0: (0,), 1: (1,)},
    differentiable=False,
)
def adagrad(xp: ModuleType, p: Any, a: Any, g: Any, lr: Any, *, epsilon: float = 1e-10) -> tuple[Any, Any]:
    """a' = a + g^2, p' = p - lr g / (sqrt(a') + epsilon). Returns (p', a').

    J. Duchi et al., "Adaptive Subgradient Methods", JMLR 2011, section 1.1 with a diagonal matrix.

    >>> import hetu as ht
    >>> p, a = adagrad([1.0], [9.0], [4.0], 0.5)
    >>> round(ht.evaluate(p).item(), 4), ht.evaluate(a).tolist()
    (0.6, [25.0])
    """
    a = a + g * g
    return p - xp.asarray(lr, dtype=p.dtype) * g / (xp.sqrt(a) + epsilon), a


@adagrad.bind
def adagrad_bind(
    xp: ModuleType, out: Any, p: Any, a: Any, g: Any, lr: Any, *, epsilon: float
) -> list[Instruction] | None:
    if xp is not np:
        return None
    (new, total), calls = outputs_in_place(out, (p, a))
    minus, negate = negated(lr, p.dtype)
    calls += negate
    for p_, a_, g_, s in blocks(new, total, g):
        calls += [partial(np.multiply, g_, g_, s), partial(np.add, a_, s, a_)]
        calls += scaled_step(p_, g_, a_, minus, p.dtype.type(epsilon), s)
    return calls


@op(
    role=Role.UPDATE,
    infer=update_type(2),
    dims="...,...,...,->...,...",
    inplace={0: (0,), 1: (1,)},
    differentiable=False,
)
def rmsprop(
    xp: ModuleType, p: Any, v: Any, g: Any, lr: Any, *, rho: float = 0.9, epsilon: float = 1e-8
) -> tuple[Any, Any]:
    """v' = rho v + (1 - rho) g^2, p' = p - lr g / (sqrt(v') + epsilon). Returns (p', v').

    T. Tieleman, G. Hinton, "Neural Networks for Machine Learning", lecture 6e, 2012.

    >>> import hetu as ht
    >>> p, v = rmsprop([1.0], [0.0], [4.0], 0.5, rho=0.75)
    >>> round(ht.evaluate(p).item(), 4), ht.evaluate(v).tolist()
    (0.0, [4.0])
    """
    v = rho * v + (1 - rho) * (g * g)
    return p - xp.asarray(lr, dtype=p.dtype) * g / (xp.sqrt(v) + epsilon), v


@rmsprop.bind
def rmsprop_bind(
    xp: ModuleType, out: Any, p: Any, v: Any, g: Any, lr: Any, *, rho: float, epsilon: float
) -> list[Instruction] | None:
    if xp is not np:
        return None
    (new, mean), calls = outputs_in_place(out, (p, v))
    minus, negate = negated(lr, p.dtype)
    calls += negate
    for p_, v_, g_, s in blocks(new, mean, g):
        calls += [partial(np.multiply, g_, g_, s), *decay(v_, s, rho, 1 - rho, s)]
        calls += scaled_step(p_, g_, v_, minus, p.dtype.type(epsilon), s)
    return calls


def _adam_scalars(xp: ModuleType, lr: Any, step: Any, beta1: float, beta2: float, epsilon: float) -> tuple[Any, Any]:
    """Rate and epsilon with both bias corrections folded in (Kingma & Ba, end of section 2), in float64."""
    t = xp.asarray(step, dtype=xp.float64)
    root = xp.sqrt(1 - beta2**t)
    return xp.asarray(lr, dtype=xp.float64) * root / (1 - beta1**t), epsilon * root


_ADAM = {"differentiable": False, "inplace": {0: (0,), 1: (1,), 2: (2,)}}


@op(role=Role.UPDATE, infer=update_type(3), dims="...,...,...,...,,->...,...,...", **_ADAM)
def adam(
    xp: ModuleType,
    p: Any,
    m: Any,
    v: Any,
    g: Any,
    lr: Any,
    step: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Any, Any, Any]:
    """m' = beta1 m + (1 - beta1) g, v' = beta2 v + (1 - beta2) g^2, p' = p - lr m^ / (sqrt(v^) + epsilon).

    m^ = m' / (1 - beta1^step) and v^ = v' / (1 - beta2^step); `step` counts from 1. `weight_decay` first shrinks p
    by the factor 1 - lr weight_decay (AdamW). Returns (p', m', v'). D. Kingma, J. Ba, "Adam", ICLR 2015,
    algorithm 1; I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2.

    >>> import hetu as ht
    >>> p, m, v = adam([1.0], [0.0], [0.0], [4.0], 0.25, 1)
    >>> round(ht.evaluate(p).item(), 4)
    0.75
    """
    alpha, eps = (xp.asarray(s, dtype=p.dtype) for s in _adam_scalars(xp, lr, step, beta1, beta2, epsilon))
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    if weight_decay:
        p = p * (1 - xp.asarray(lr, dtype=p.dtype) * weight_decay)
    return p - alpha * m / (xp.sqrt(v) + eps), m, v


@adam.bind
def adam_bind(
    xp: ModuleType,
    out: Any,
    p: Any,
    m: Any,
    v: Any,
    g: Any,
    lr: Any,
    step: Any,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> list[Instruction] | None:
    if xp is not np:
        return None
    (new, mean, square), calls = outputs_in_place(out, (p, m, v))
    minus, eps, keep = (np.empty((), p.dtype) for _ in range(3))
    calls.append(partial(_fold, lr, step, minus, eps, keep, beta1, beta2, epsilon, weight_decay))
    for p_, m_, v_, g_, s in blocks(new, mean, square, g):
        calls += decay(m_, g_, beta1, 1 - beta1, s)
        calls += [partial(np.multiply, g_, g_, s), *decay(v_, s, beta2, 1 - beta2, s)]
        if weight_decay:
            calls.append(partial(np.multiply, p_, keep, p_))
        calls += scaled_step(p_, m_, v_, minus, eps, s)
    return calls


def _fold(
    lr: np.ndarray,
    step: np.ndarray,
    minus: np.ndarray,
    eps: np.ndarray,
    keep: np.ndarray,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> None:
    """Fill the scalars of one Adam step. Plain floats: five ufunc calls on 0-d arrays would take longer."""
    t, rate = step.item(), lr.item()
    root = math.sqrt(1 - beta2**t)
    minus[()], eps[()], keep[()] = -rate * root / (1 - beta1**t), epsilon * root, 1 - rate * weight_decay


@op(
    role=Role.UPDATE,
    infer=update_type(4),
    dims="...,...,...,...,...,,->...,...,...,...",
    differentiable=False,
    inplace={0: (0,), 1: (1,), 2: (2,), 3: (3,)},
)
def amsgrad(
    xp: ModuleType,
    p: Any,
    m: Any,
    v: Any,
    top: Any,
    g: Any,
    lr: Any,
    step: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> tuple[Any, Any, Any, Any]:
    """Adam with `top`, the maximum of all v so far, in place of v. Returns (p', m', v', top').

    S. Reddi et al., "On the Convergence of Adam and Beyond", ICLR 2018, algorithm 2, with Adam's bias corrections.

    >>> import hetu as ht
    >>> p, m, v, top = amsgrad([1.0], [0.0], [0.0], [0.0], [4.0], 0.25, 1)
    >>> round(ht.evaluate(p).item(), 4)
    0.75
    """
    alpha, eps = (xp.asarray(s, dtype=p.dtype) for s in _adam_scalars(xp, lr, step, beta1, beta2, epsilon))
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    top = xp.maximum(top, v)
    return p - alpha * m / (xp.sqrt(top) + eps), m, v, top


@amsgrad.bind
def amsgrad_bind(
    xp: ModuleType,
    out: Any,
    p: Any,
    m: Any,
    v: Any,
    top: Any,
    g: Any,
    lr: Any,
    step: Any,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> list[Instruction] | None:
    if xp is not np:
        return None
    (new, mean, square, highest), calls = outputs_in_place(out, (p, m, v, top))
    minus, eps, keep = (np.empty((), p.dtype) for _ in range(3))
    calls.append(partial(_fold, lr, step, minus, eps, keep, beta1, beta2, epsilon, 0.0))
    for p_, m_, v_, top_, g_, s in blocks(new, mean, square, highest, g):
        calls += decay(m_, g_, beta1, 1 - beta1, s)
        calls += [partial(np.multiply, g_, g_, s), *decay(v_, s, beta2, 1 - beta2, s)]
        calls.append(partial(np.maximum, top_, v_, out=top_))
        calls += scaled_step(p_, m_, top_, minus, eps, s)
    return calls


@op(role=Role.UPDATE, infer=update_type(3), dims=_whole, **_ADAM)
def lamb(
    xp: ModuleType,
    p: Any,
    m: Any,
    v: Any,
    g: Any,
    lr: Any,
    step: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    weight_decay: float = 0.01,
) -> tuple[Any, Any, Any]:
    """Adam's direction r = m^ / (sqrt(v^) + epsilon) + weight_decay p, rescaled: p' = p - lr (|p| / |r|) r.

    Where one of the norms is 0 the ratio is 1. Returns (p', m', v'). It has no row form, as it needs the norm of the
    whole parameter. Y. You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2.

    >>> import hetu as ht
    >>> p, m, v = lamb([3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0], 0.1, 1, weight_decay=0.0)
    >>> [round(x, 3) for x in ht.evaluate(p).tolist()]
    [2.646, 3.646]
    """
    alpha, eps = (xp.asarray(s, dtype=p.dtype) for s in _adam_scalars(xp, 1.0, step, beta1, beta2, epsilon))
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    r = alpha * m / (xp.sqrt(v) + eps) + weight_decay * p
    length, wanted = (xp.sqrt(xp.sum(x * x)) for x in (r, p))
    one = xp.ones_like(length)
    ratio = xp.where((length > 0) & (wanted > 0), wanted / xp.where(length > 0, length, one), one)
    return p - xp.asarray(lr, dtype=p.dtype) * ratio * r, m, v


sgd_rows = row_form(sgd, 1)
sgd_rows.bind(subtract_rows)
momentum_rows = row_form(momentum, 2)
adagrad_rows = row_form(adagrad, 2)
rmsprop_rows = row_form(rmsprop, 2)
adam_rows = row_form(adam, 3)
amsgrad_rows = row_form(amsgrad, 4)

# The row form of each rule that has one: the inputs are the same, with `g` replaced by `ids, rows`.
ROW_FORMS = {
    "sgd": sgd_rows,
    "momentum": momentum_rows,
    "adagrad": adagrad_rows,
    "rmsprop": rmsprop_rows,
    "adam": adam_rows,
    "amsgrad": amsgrad_rows,
}
