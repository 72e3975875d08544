"""What all optimizers share: from a loss to a mapping of new values for its variables.

`minimize` only builds graph: the executor commits the mapping after each step. An optimizer's state (moments, step)
consists of ordinary variables, so it is saved, resumed and sharded like any other. For rates per variable, call `apply`
on a part of the gradients with a second optimizer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Annotated, Any, TypedDict
from weakref import WeakKeyDictionary, ref

import numpy as np

from .answers import AnswersCalls
from .core.autodiff import gradients
from .core.errors import (
    ArgumentError,
    DTypeError,
    GradientError,
    ShapeError,
    Site,
    UnknownNameError,
    did_you_mean,
    public,
    user_site,
)
from .core.graph import OPS, Node, tagged, topological
from .core.leaf import unique_name, variable
from .core.op import Op, Role
from .core.operators import with_updates_op, zeros_like
from .init import zeros
from .ops import astype, clip, maximum, sqrt
from .ops import sum as sum_
from .ranges import AtLeast0, Or, Positive
from .schedules import RateSchedule

__all__ = ["Optimizer", "Updates"]

NewValues = dict[Node, Node]


Rate = Annotated[AtLeast0, Or(Node)] | RateSchedule


class OptimizerOptions(TypedDict, total=False):
    """What every optimizer takes besides its own hyperparameters."""

    weight_decay: AtLeast0
    clip_value: Positive | None
    clip_norm: Positive | None


LOSSES: WeakKeyDictionary[Node, tuple[ref[Node], Site | None]] = WeakKeyDictionary()  # updates made of them, by whom


class Updates(dict[Node, Node]):
    """New values by variable, for an `Executor` to commit; `.gradients` holds the gradient node of each variable.

    >>> import hetu as ht
    >>> w = ht.variable("w", 3.0, ())
    >>> updates = ht.optim.SGD(0.1).minimize(w * w)
    >>> float(ht.evaluate(updates.gradients[w]))
    6.0
    """

    gradients: dict[Node, Node]

    def __init__(self, values: Mapping[Node, Node], gradients: Mapping[Node, Node]) -> None:
        super().__init__(values)
        self.gradients = dict(gradients)

    def __or__(self, other: Mapping[Node, Node]) -> Updates:  # type: ignore[override]
        """Both, with the gradients of both."""
        return Updates({**self, **other}, self.gradients | getattr(other, "gradients", {}))

    def __ror__(self, other: Mapping[Node, Node]) -> Updates:  # type: ignore[override]
        return Updates({**other, **self}, self.gradients)

    def __ior__(self, other: Mapping[Node, Node]) -> Updates:  # type: ignore[override]
        self.update(other)
        return self

    def update(self, other: Mapping[Node, Node]) -> None:  # type: ignore[override]
        """Take those of `other`, too, with their gradients."""
        super().update(other)
        self.gradients |= getattr(other, "gradients", {})


class Optimizer(AnswersCalls):
    """Base class: gradients, clipping, L2 decay and the step count; a subclass names its `rule`.

    `learning_rate` is a number, a schedule of the step (`hetu.schedules`), or a node, say a variable
    that is set by hand. Gradients are clipped first, to [-clip_value, clip_value] and then to a global norm of at most
    `clip_norm`; after that `weight_decay` adds weight_decay * p, the gradient of an L2 penalty, unless the class is
    `decoupled`: its rule then takes the decay.
    Of a table that the loss only looks up, as `nn.Embedding` does, a step changes the rows looked up and their states
    alone: lazily, as SparseAdam, clipped and under a loss scale too. All rows change where an L2 `weight_decay` is
    added, where the rule needs norms of whole parameters, as LAMB does, and in an executor without the pass
    `sparsify_updates`. `hyperparameters` are those of the rule, by name. Variables: `<optimizer>/step` (int64, updates
    done so far) and `<variable>/<state>` for the states of the rule.

    >>> import hetu as ht
    >>> @ht.optim.update_rule
    ... def sign_descent(p, g, lr, *, scale=1.0):
    ...     return p - lr * scale * ht.sign(g)
    >>> class SignDescent(Optimizer):
    ...     rule = sign_descent
    >>> w = ht.variable("w", 3.0, ())
    >>> ex = ht.Executor([SignDescent(0.25, scale=2.0).minimize(w * w)])
    >>> _ = ex.run(); float(ex.state[w])
    2.5

    The rows of a table that a step has not looked up move on with their momentum only where updates are dense.

    >>> from hetu.passes import PASSES
    >>> table, ids = ht.variable("table", ht.init.zeros, (2,)), ht.placeholder("ids", (1,), "int64")
    >>> train = [ht.optim.Momentum(0.5, 0.5).minimize(ht.sum(ht.take(table, ids, axis=0)))]
    >>> for passes in (None, [name for name in PASSES if name != "sparsify_updates"]):
    ...     ex = ht.Executor(train, passes=passes)
    ...     _ = ex.run({ids: [0]}), ex.run({ids: [1]}); print(ex.state[table])
    [-0.5 -0.5]
    [-0.75 -0.5 ]
    """

    rule: Op[..., Any]
    decoupled = False  # whether weight decay is a matter of the rule, apart from the gradient

    def __init__(
        self,
        learning_rate: Rate,
        *,
        weight_decay: AtLeast0 = 0.0,
        clip_value: Positive | None = None,
        clip_norm: Positive | None = None,
        **hyperparameters: Any,
    ) -> None:
        if self.decoupled:
            hyperparameters["weight_decay"], weight_decay = weight_decay, 0.0
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.clip_value, self.clip_norm, self.hyperparameters = clip_value, clip_norm, hyperparameters
        known = self.rule.defaults if hyperparameters else {}
        for name in hyperparameters.keys() - known.keys():
            able = [c.__name__ for c in Optimizer.__subclasses__() if name in getattr(c, "rule", self.rule).defaults]
            own = {"learning_rate", *known, *OptimizerOptions.__annotations__}
            fix = f"use {able[0]}, which does" if able else did_you_mean(name, own)
            raise UnknownNameError(f"{type(self).__name__} takes no {name!r}", fix=fix)
        self.step = variable(f"{unique_name('optimizer')}/step", 0, (), "int64", trainable=False)
        self.slots: dict[str, Node] = {}

    @public
    def minimize(self, loss: Node, variables: Iterable[Node] | None = None) -> Updates:
        """Updates that lower `loss`, a float scalar, by changing `variables`.

        By default these are all trainable variables that the gradient reaches, in the order they were made. Of those
        that are named, as by `layer.variables`, statistics that the loss itself keeps up to date are left out; one
        that does not reach the loss is a GradientError.
        """
        if variables is not None:
            named = list(variables)
            _check_variables(named)
            kept = {v for n in topological([loss]) if n.op is with_updates_op for v in n.inputs[1::2]}
            trained = [v for v in named if v not in kept]
            return self.apply(dict(zip(trained, gradients(loss, trained))))
        found = [n for n in topological([loss]) if n.role is Role.VARIABLE and n.attrs["trainable"]]
        found.sort(key=lambda node: node.serial)
        pairs = zip(found, gradients(loss, found, allow_unused=True))
        reached = {p: g for p, g in pairs if not _is_unused(g, p)}
        if not reached:
            raise GradientError(
                f"the loss {loss!r} depends on no trainable variable",
                fix="build it from layers or ht.variable(...), and check for stop_gradient on the way",
            )
        updates = self.apply(reached)
        LOSSES[loss] = ref(updates[self.step]), user_site()
        return updates

    @public
    def apply(self, gradients: Mapping[Node, Node]) -> Updates:
        """Updates from given gradients, {variable: gradient of the same shape and dtype}."""
        _check_variables(gradients)
        for p, g in gradients.items():
            if p.type != g.type:
                raise ShapeError(f"the gradient {g!r} does not fit {p!r}", fix="give it the variable's shape and dtype")
        values: NewValues = {}
        with tagged(update=True):  # all of it follows from whole gradients, not from those of micro-batches
            rate = self.learning_rate(self.step) if callable(self.learning_rate) else self.learning_rate
            step = self.step + 1
            for p, g in self._conditioned(gradients).items():
                values |= self.new_values(p, g, rate, step)
        return Updates({**values, self.step: step}, gradients)

    @public
    def new_values(self, p: Node, g: Node, rate: Node | float, step: Node) -> NewValues:
        """New values of `p` and its slots, by the rule. `step` counts from 1.

        A subclass that overrides this instead of naming a rule trains its variables too, but where they are.
        """
        for name, value in {**self.rule.defaults, **self.hyperparameters}.items():
            if isinstance(value, float) and value and not np.asarray(value, p.dtype):
                fix = f'pass a larger one, or keep it in float32: an executor of precision="{p.dtype}" computes in that'
                raise DTypeError(f"{name}={value} is 0 in {p.dtype}, of which the variable {p.name!r} is", fix=fix)
        slots = [self.slot(p, name) for name in self.rule.update.states]
        scalars = (rate, step) if self.rule.update.timed else (rate,)
        made = self.rule(p, *slots, g, *scalars, **self.hyperparameters)
        return dict(zip((p, *slots), made if slots else (made,), strict=True))

    @public
    def slot(self, p: Node, name: str) -> Node:
        """The state variable `<p>/<name>` of the shape and dtype of `p`, zero at first; the same node every time."""
        full = f"{p.name}/{name}"
        if full not in self.slots:
            # The name of `p` holds its scope already, so the scope in force here must not be added to it.
            self.slots[full] = OPS["variable"](name=full, shape=p.shape, dtype=p.dtype, init=zeros, trainable=False)
        return self.slots[full]

    def _conditioned(self, gradients: Mapping[Node, Node]) -> dict[Node, Node]:
        """The gradients clipped and with L2 decay added."""
        made = dict(gradients)
        if self.clip_value is not None:
            made = {p: clip(g, min=-self.clip_value, max=self.clip_value) for p, g in made.items()}
        if self.clip_norm is not None:
            made = clip_by_global_norm(made, self.clip_norm)
        if self.weight_decay:
            made = {p: g + self.weight_decay * p for p, g in made.items()}
        return made

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.step.name.removesuffix('/step')!r}, learning rate {self.learning_rate}>"


@public
def clip_by_global_norm(gradients: Mapping[Node, Node], limit: Positive) -> dict[Node, Node]:
    """All gradients times limit / max(limit, norm), where norm is that of all of them together.

    R. Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013, algorithm 1.

    >>> import hetu as ht
    >>> a, b = ht.variable("a", 0.0, ()), ht.variable("b", 0.0, ())
    >>> clipped = clip_by_global_norm({a: ht.constant(value=3.0), b: ht.constant(value=4.0)}, 1.0)
    >>> [round(float(ht.evaluate(g)), 3) for g in clipped.values()]
    [0.6, 0.8]
    """
    if not gradients:
        return {}
    square = reduce(operator.add, (sum_(g * g) for g in gradients.values()))
    scale = limit / maximum(sqrt(square), limit)
    return {p: g * (scale if scale.dtype == g.dtype else astype(scale, g.dtype)) for p, g in gradients.items()}


def _check_variables(nodes: Iterable[Node]) -> None:
    for node in nodes:
        if not isinstance(node, Node) or node.role is not Role.VARIABLE:
            raise ArgumentError(f"{node!r} is not a variable", fix="pass nodes made by ht.variable or layer.variables")


def _is_unused(gradient: Node, p: Node) -> bool:
    """Whether `gradients` found no path to `p` and stood in zeros."""
    return gradient.op is zeros_like and gradient.inputs == (p,)
