"""Optimizers that keep running means of gradients: Adam and what came of it."""

from __future__ import annotations

from typing import Any, Unpack

from ..core.graph import Node
from ..core.op import Op
from ..ops import logical_and, maximum, sign, sqrt, where
from ..ops import sum as sum_
from ..ops.update import update_rule
from ..optimizer import Optimizer, OptimizerOptions, Rate
from ..ranges import AtLeast0, Beta, Positive


def _moments(m: Node, v: Node, g: Node, beta1: Beta, beta2: Beta) -> tuple[Node, Node]:
    """The running means of gradients and of their squares."""
    return beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * (g * g)


def _corrected(lr: Node | float, step: Node, beta1: Beta, beta2: Beta, epsilon: AtLeast0) -> tuple[Node, Node]:
    """Rate and epsilon with both bias corrections folded in (Kingma & Ba, end of section 2)."""
    root = sqrt(1 - beta2**step)
    return lr * root / (1 - beta1**step), epsilon * root


@update_rule
def adam(
    p: Node,
    m: Node,
    v: Node,
    g: Node,
    lr: Node,
    step: Node,
    *,
    beta1: Beta = 0.9,
    beta2: Beta = 0.999,
    epsilon: AtLeast0 = 1e-8,
    weight_decay: AtLeast0 = 0.0,
) -> tuple[Node, Node, Node]:
    """m' = beta1 m + (1 - beta1) g, v' = beta2 v + (1 - beta2) g^2, p' = p - lr m^ / (sqrt(v^) + epsilon).

    m^ = m' / (1 - beta1^step) and v^ = v' / (1 - beta2^step); `step` counts from 1. `weight_decay` first shrinks p
    by the factor 1 - lr weight_decay (AdamW). Returns (p', m', v'). D. Kingma, J. Ba, "Adam", ICLR 2015,
    algorithm 1; I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2.

    >>> import hetu as ht
    >>> p, m, v = adam([1.0], [0.0], [0.0], [4.0], 0.25, 1)
    >>> round(ht.evaluate(p).item(), 4)
    0.75
    """
    alpha, eps = _corrected(lr, step, beta1, beta2, epsilon)
    m, v = _moments(m, v, g, beta1, beta2)
    if weight_decay:
        p = p * (1 - lr * weight_decay)
    return p - alpha * (m / (sqrt(v) + eps)), m, v


class Adam(Optimizer):
    """Running means of gradients and of their squares. See `adam`; `weight_decay` here is L2.

    Lazy on tables that are looked up, such as `nn.Embedding`: other rows and their means rest, see `Optimizer`.

    >>> import hetu as ht
    >>> w = ht.variable("w", 3.0, ())
    >>> ex = ht.Executor([Adam(0.5).minimize(w * w)])
    >>> _ = ex.run(); round(float(ex.state["w"]), 4), sorted(ex.state)[1:]
    (2.5, ['w', 'w/adam_m', 'w/adam_v'])
    """

    rule: Op[..., Any] = adam

    def __init__(
        self,
        learning_rate: Rate = 1e-3,
        *,
        beta1: Beta = 0.9,
        beta2: Beta = 0.999,
        epsilon: AtLeast0 = 1e-8,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon, **options)


@update_rule
def amsgrad(
    p: Node,
    m: Node,
    v: Node,
    top: Node,
    g: Node,
    lr: Node,
    step: Node,
    *,
    beta1: Beta = 0.9,
    beta2: Beta = 0.999,
    epsilon: AtLeast0 = 1e-8,
) -> tuple[Node, Node, Node, Node]:
    """Adam with `top`, the maximum of all v so far, in place of v. Returns (p', m', v', top').

    S. Reddi et al., "On the Convergence of Adam and Beyond", ICLR 2018, algorithm 2, with Adam's bias corrections.

    >>> import hetu as ht
    >>> p, m, v, top = amsgrad([1.0], [0.0], [0.0], [0.0], [4.0], 0.25, 1)
    >>> round(ht.evaluate(p).item(), 4)
    0.75
    """
    alpha, eps = _corrected(lr, step, beta1, beta2, epsilon)
    m, v = _moments(m, v, g, beta1, beta2)
    top = maximum(top, v)
    return p - alpha * (m / (sqrt(top) + eps)), m, v, top


class AMSGrad(Adam):
    """Adam whose second moment never falls. See `amsgrad`.

    >>> import hetu as ht
    >>> w = ht.variable("w", 3.0, ())
    >>> ex = ht.Executor([AMSGrad(0.5).minimize(w * w)])
    >>> _ = ex.run(); round(float(ex.state[w]), 3)
    2.5
    """

    rule = amsgrad


class AdamW(Adam):
    """Adam with decoupled weight decay: p shrinks by lr * weight_decay, apart from the gradient's scaling.

    >>> import hetu as ht
    >>> w = ht.variable("w", 3.0, ())
    >>> ex = ht.Executor([AdamW(0.5, weight_decay=0.1).minimize(w * w)])
    >>> _ = ex.run(); round(float(ex.state[w]), 3)
    2.35
    """

    decoupled = True

    def __init__(
        self,
        learning_rate: Rate = 1e-3,
        *,
        beta1: Beta = 0.9,
        beta2: Beta = 0.999,
        epsilon: AtLeast0 = 1e-8,
        weight_decay: AtLeast0 = 0.01,
        clip_value: Positive | None = None,
        clip_norm: Positive | None = None,
    ) -> None:
        options = OptimizerOptions(weight_decay=weight_decay, clip_value=clip_value, clip_norm=clip_norm)
        super().__init__(learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon, **options)


@update_rule
def lamb(
    p: Node,
    m: Node,
    v: Node,
    g: Node,
    lr: Node,
    step: Node,
    *,
    beta1: Beta = 0.9,
    beta2: Beta = 0.999,
    epsilon: AtLeast0 = 1e-6,
    weight_decay: AtLeast0 = 0.01,
) -> tuple[Node, Node, Node]:
    """Adam's direction r = m^ / (sqrt(v^) + epsilon) + weight_decay p, rescaled: p' = p - lr (|p| / |r|) r.

    Where one of the norms is 0 the ratio is 1. Returns (p', m', v'). Y. You et al., "Large Batch Optimization for Deep
    Learning", ICLR 2020, algorithm 2.

    >>> import hetu as ht
    >>> p, m, v = lamb([3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0], 0.1, 1, weight_decay=0.0)
    >>> [round(x, 3) for x in ht.evaluate(p).tolist()]
    [2.646, 3.646]
    """
    alpha, eps = _corrected(1.0, step, beta1, beta2, epsilon)
    m, v = _moments(m, v, g, beta1, beta2)
    r = alpha * (m / (sqrt(v) + eps)) + weight_decay * p
    length, wanted = sqrt(sum_(r * r)), sqrt(sum_(p * p))
    ratio = where(logical_and(length > 0, wanted > 0), wanted / where(length > 0, length, 1.0), 1.0)
    return p - lr * ratio * r, m, v


class LAMB(AdamW):
    """Adam's direction at the length of the parameter, for large batches. See `lamb`.

    >>> import hetu as ht
    >>> w = ht.variable("w", 3.0, ())
    >>> ex = ht.Executor([LAMB(0.5).minimize(w * w)])
    >>> _ = ex.run(); round(float(ex.state[w]), 3)
    1.5
    """

    rule = lamb


@update_rule
def lion(
    p: Node, m: Node, g: Node, lr: Node, *, beta1: Beta = 0.9, beta2: Beta = 0.99, weight_decay: AtLeast0 = 0.0
) -> tuple[Node, Node]:
    """p' = p - lr (sign(beta1 m + (1 - beta1) g) + weight_decay p), m' = beta2 m + (1 - beta2) g. Returns (p', m').

    X. Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2.

    >>> import hetu as ht
    >>> p, m = lion([1.0, 1.0], [1.0, -1.0], [0.0, 0.5], 0.25)
    >>> ht.evaluate(p).tolist()
    [0.75, 1.25]
    """
    direction = sign(beta1 * m + (1 - beta1) * g)
    if weight_decay:
        direction = direction + weight_decay * p
    return p - lr * direction, beta2 * m + (1 - beta2) * g


class Lion(Optimizer):
    """Steps of one length along the sign of a running mean. Wants smaller rates than Adam. See `lion`.

    >>> import hetu as ht
    >>> w = ht.variable("w", 3.0, ())
    >>> ex = ht.Executor([Lion(0.5).minimize(w * w)])
    >>> _ = ex.run(); round(float(ex.state[w]), 3), sorted(ex.state)[1:]
    (2.5, ['w', 'w/lion_m'])
    """

    rule = lion
    decoupled = True

    def __init__(
        self,
        learning_rate: Rate = 1e-4,
        *,
        beta1: Beta = 0.9,
        beta2: Beta = 0.99,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, beta1=beta1, beta2=beta2, **options)
