"""Optimizers by the gradient itself, and those with a rate for each element by all gradients so far."""

from __future__ import annotations

from typing import Unpack

from ..core.graph import Node
from ..ops import abs as abs_
from ..ops import sign, sqrt, where
from ..ops.update import update_rule
from ..optimizer import Optimizer, OptimizerOptions, Rate
from ..ranges import AtLeast0, Beta, Fraction

# -- gradient descent ------------------------------------------------------------------------------------------


@update_rule
def sgd(p: Node, g: Node, lr: Node) -> Node:
    """Gradient descent: p - lr g.

    >>> import hetu as ht
    >>> ht.evaluate(sgd([1.0, 2.0], [10.0, 10.0], 0.1)).tolist()
    [0.0, 1.0]
    """
    return p - lr * g


class SGD(Optimizer):
    """Gradient descent, p - lr g. Options as in `Optimizer`.

    >>> import hetu as ht
    >>> w = ht.variable("w", 3.0, ())
    >>> ex = ht.Executor([SGD(0.25).minimize(w * w)])
    >>> _ = ex.run(); float(ex.state["w"])
    1.5
    """

    rule = sgd


@update_rule(states=["momentum"])
def momentum(
    p: Node, v: Node, g: Node, lr: Node, *, momentum: Fraction = 0.9, nesterov: bool = False
) -> tuple[Node, Node]:
    """Heavy ball: v' = momentum v + g, p' = p - lr v'. With `nesterov`, p' = p - lr (g + momentum v').

    B. Polyak, 1964; I. Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013,
    eq. 3-4, with the rate taken out of v (equal while the rate is constant). Returns (p', v').

    >>> import hetu as ht
    >>> p, v = momentum([1.0], [2.0], [1.0], 0.5, momentum=0.5)
    >>> ht.evaluate(p).tolist(), ht.evaluate(v).tolist()
    ([0.0], [2.0])
    """
    v = momentum * v + g
    return p - lr * (g + momentum * v if nesterov else v), v


class Momentum(Optimizer):
    """Gradient descent with a heavy ball, or Nesterov's look-ahead. Rule and source: `momentum`.

    >>> import hetu as ht
    >>> w = ht.variable("w", 3.0, ())
    >>> ex = ht.Executor([Momentum(0.25, 0.5, nesterov=True).minimize(w * w)])
    >>> _ = ex.run(); round(float(ex.state[w]), 3)
    0.75
    """

    rule = momentum

    def __init__(
        self,
        learning_rate: Rate,
        momentum: Fraction = 0.9,
        *,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, momentum=momentum, nesterov=nesterov, **options)


# -- a rate per element ----------------------------------------------------------------------------------------


@update_rule(states=["adagrad_sum"])
def adagrad(p: Node, a: Node, g: Node, lr: Node, *, epsilon: AtLeast0 = 1e-10) -> tuple[Node, Node]:
    """a' = a + g^2, p' = p - lr g / (sqrt(a') + epsilon). Returns (p', a').

    J. Duchi et al., "Adaptive Subgradient Methods", JMLR 2011, section 1.1 with a diagonal matrix.

    >>> import hetu as ht
    >>> p, a = adagrad([1.0], [9.0], [4.0], 0.5)
    >>> round(ht.evaluate(p).item(), 4), ht.evaluate(a).tolist()
    (0.6, [25.0])
    """
    a = a + g * g
    return p - lr * (g / (sqrt(a) + epsilon)), a


class AdaGrad(Optimizer):
    """A rate per element that falls with the squares of all gradients so far. See `adagrad`.

    >>> import hetu as ht
    >>> w = ht.variable("w", 3.0, ())
    >>> ex = ht.Executor([AdaGrad(0.5).minimize(w * w)])
    >>> _ = ex.run(); round(float(ex.state[w]), 3)
    2.5
    """

    rule = adagrad

    def __init__(
        self, learning_rate: Rate = 0.01, *, epsilon: AtLeast0 = 1e-10, **options: Unpack[OptimizerOptions]
    ) -> None:
        super().__init__(learning_rate, epsilon=epsilon, **options)


@update_rule
def rmsprop(p: Node, v: Node, g: Node, lr: Node, *, rho: Beta = 0.9, epsilon: AtLeast0 = 1e-8) -> tuple[Node, Node]:
    """v' = rho v + (1 - rho) g^2, p' = p - lr g / (sqrt(v') + epsilon). Returns (p', v').

    T. Tieleman, G. Hinton, "Neural Networks for Machine Learning", lecture 6e, 2012.

    >>> import hetu as ht
    >>> p, v = rmsprop([1.0], [0.0], [4.0], 0.5, rho=0.75)
    >>> round(ht.evaluate(p).item(), 4), ht.evaluate(v).tolist()
    (0.0, [4.0])
    """
    v = rho * v + (1 - rho) * (g * g)
    return p - lr * (g / (sqrt(v) + epsilon)), v


class RMSProp(Optimizer):
    """A rate per element over a running mean of squared gradients. See `rmsprop`.

    >>> import hetu as ht
    >>> w = ht.variable("w", 3.0, ())
    >>> ex = ht.Executor([RMSProp(0.5, rho=0.75).minimize(w * w)])
    >>> _ = ex.run(); round(float(ex.state[w]), 3)
    2.0
    """

    rule = rmsprop

    def __init__(
        self,
        learning_rate: Rate = 1e-3,
        *,
        rho: Beta = 0.9,
        epsilon: AtLeast0 = 1e-8,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, rho=rho, epsilon=epsilon, **options)


@update_rule
def ftrl(
    p: Node, z: Node, n: Node, g: Node, lr: Node, *, beta: AtLeast0 = 1.0, l1: AtLeast0 = 0.0, l2: AtLeast0 = 0.0
) -> tuple[Node, Node, Node]:
    """n' = n + g^2, z' = z + g - (sqrt(n') - sqrt(n)) / lr p; p' is 0 where |z'| <= l1, and elsewhere
    (sign(z') l1 - z') / ((beta + sqrt(n')) / lr + l2).

    H. B. McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, algorithm 1, where lr is alpha.
    Returns (p', z', n').

    >>> import hetu as ht
    >>> p, z, n = ftrl([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [3.0, 0.5], 0.5, l1=1.0)
    >>> ht.evaluate(p).tolist(), ht.evaluate(z).tolist()
    ([-0.25, 0.0], [3.0, 0.5])
    """
    root, n = sqrt(n), n + g * g
    z = z + g - (sqrt(n) - root) / lr * p
    return where(abs_(z) <= l1, 0.0, (sign(z) * l1 - z) / ((beta + sqrt(n)) / lr + l2)), z, n


class FTRL(Optimizer):
    """Follow the regularized leader: AdaGrad's rates, and with `l1` weights that are exactly 0. See `ftrl`.

    For linear models of rare features. Weights begin at 0; others are soon forgotten, as by the paper.

    >>> import hetu as ht
    >>> w = ht.variable("w", [0.0, 0.0])
    >>> ex = ht.Executor([FTRL(0.5, l1=1.0).minimize(ht.sum(w * [3.0, 0.5]))])
    >>> _ = ex.run(); ex.state[w].tolist()
    [-0.25, 0.0]
    """

    rule = ftrl

    def __init__(
        self,
        learning_rate: Rate = 0.1,
        *,
        beta: AtLeast0 = 1.0,
        l1: AtLeast0 = 0.0,
        l2: AtLeast0 = 0.0,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, beta=beta, l1=l1, l2=l2, **options)
