"""Loss functions. Each returns one loss per sample or element: write `ht.mean(...)` around it.

Predictions and targets must have equal shapes; unlike arithmetic, a loss never broadcasts. For weights per class or
sample, multiply; for a reduction, call one. Only the cross entropy of class ids is an operator, with its gradient in
one more; the others are compositions. Log-sum-exp with the maximum taken out cannot overflow, and softmax minus the
target is one pass. Ids are checked before every run. Logits in 16 bits are computed in float32.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, DTypeError, ShapeError, ValueRangeError, public
from ..core.graph import OPS, Node
from ..core.op import as_node, as_nodes, op
from ..core.operators import astype
from ..core.types import Shape, TensorType, compatible, is_float, require_float, show_shape
from ..doubts import keeps_numbers, takes_logits, takes_probabilities
from .elementwise import in_full, rounded, widened
from .index import RowWindow
from .reduction import logsumexp
from .shape import squeeze

__all__ = [
    "binary_cross_entropy_with_logits", "huber_loss", "kl_divergence", "mae_loss", "mse_loss", "nll_loss",
    "softmax_cross_entropy",
]  # fmt: skip


def check_labels(logits: TensorType, labels: TensorType) -> None:
    """ShapeError or DTypeError unless `labels` are ids of the classes on the last axis of `logits`."""
    require_float(logits)
    if logits.ndim == 0:
        raise ShapeError(
            "the logits are one number, wanted classes on the last axis", fix="pass shape (samples, classes)"
        )
    if is_float(labels.dtype):
        raise DTypeError(
            f"class ids are {labels}, wanted integers of shape {show_shape(logits.shape[:-1])}",
            fix='convert them with ht.astype(labels, "int64"), or feed integers',
        )
    if labels.dtype.kind not in "iu":
        raise DTypeError(f"class ids are {labels}, wanted integers", fix='convert them with ht.astype(labels, "int64")')
    if not fit(labels.shape, logits.shape[:-1]):
        raise ShapeError(
            f"class ids have shape {show_shape(labels.shape)}, the logits {show_shape(logits.shape)} want "
            f"{show_shape(logits.shape[:-1])}",
            fix=_layout_remedy(logits, labels),
        )


def fit(a: Shape, b: Shape) -> bool:
    return len(a) == len(b) and all(map(compatible, a, b))


def _layout_remedy(logits: TensorType, labels: TensorType) -> str:
    if fit(labels.shape, logits.shape):
        return 'labels look one-hot: use ht.argmax(labels, axis=-1), or ht.astype(labels, "float32") for a distribution'
    if labels.ndim == logits.ndim and labels.shape[-1] == 1:
        return "drop the last axis of the labels with ht.squeeze(labels, axis=-1)"
    if logits.ndim > 2 and fit(labels.shape, (logits.shape[0], *logits.shape[2:])):
        order = (0, *range(2, logits.ndim), 1)
        return f"classes must be the last axis of the logits: use ht.permute_dims(logits, {order})"
    return "the labels must have the shape of the logits without their last axis, the classes"


def check_smoothing(logits: TensorType, label_smoothing: float) -> None:
    """ArgumentError for what is no share, ShapeError where there is no class to give it to."""
    if logits.shape[-1:] == (0,):
        raise ShapeError(f"the logits {logits} have no classes", fix="give the last axis one class at least")
    if not isinstance(label_smoothing, int | float) or not 0 <= label_smoothing < 1:
        raise ArgumentError(f"label_smoothing={label_smoothing!r}", fix="pass 0 <= label_smoothing < 1")


def check_class_ids(labels: Any, classes: int, ignore_index: int | None) -> None:
    """ValueRangeError that names the first id outside 0, ..., classes - 1 and its place."""
    labels = labels.get() if hasattr(labels, "get") else np.asarray(labels)
    # by position: NumPy finds extrema eight times as fast as it fetches them
    if not labels.size or (labels.item(labels.argmin()) >= 0 and labels.item(labels.argmax()) < classes):
        return
    bad = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        bad &= labels != ignore_index
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueRangeError(
            f"class id {int(labels[place])} at position {list(place)} does not name one of {classes} classes",
            fix=f"ids must be 0 to {classes - 1}"
            + ("; pass ignore_index= to skip samples" if ignore_index is None else f", or {ignore_index} to skip"),
        )


def _one_hot(xp: ModuleType, logits: Any, labels: Any, first: int = 0) -> Any:
    """Where each row's own class is, as a boolean array of the shape of the logits; classes count from `first`."""
    classes = xp.arange(first, first + logits.shape[-1], dtype=xp.int64)
    return xp.expand_dims(in_full(xp, labels), axis=-1) == classes


def _entropy_type(
    logits: TensorType, labels: TensorType, *, label_smoothing: float, **_: Any
) -> tuple[TensorType, TensorType]:
    check_labels(logits, labels)
    check_smoothing(logits, label_smoothing)
    loss = TensorType(logits.shape[:-1], logits.dtype)
    return loss, loss


@op(name="softmax_cross_entropy", infer=_entropy_type, dims="...v!,...->...,...")
def cross_entropy_of_ids(
    xp: ModuleType,
    logits: Any,
    labels: Any,
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Any:
    """The loss of each row, see `softmax_cross_entropy`, and log(sum(exp(row))), which the gradient uses again.

    >>> import hetu as ht
    >>> logits, labels = ht.placeholder("logits", (None, 10)), ht.placeholder("labels", (None,), "int64")
    >>> len(cross_entropy_of_ids(logits, labels))
    2
    """
    kept, logits = logits, widened(xp, logits, logits)
    top = xp.max(logits, axis=-1, keepdims=True)
    top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))  # infinity minus infinity is NaN
    total = xp.squeeze(top, axis=-1) + xp.log(xp.sum(xp.exp(logits - top), axis=-1, dtype=logits.dtype))
    own = xp.sum(xp.where(_one_hot(xp, logits, labels), logits, xp.zeros_like(logits)), axis=-1, dtype=logits.dtype)
    loss = total - own
    if label_smoothing:
        loss = loss + label_smoothing * (own - xp.mean(logits, axis=-1))
    if ignore_index is not None:
        loss = xp.where(labels == ignore_index, xp.zeros_like(loss), loss)
    return rounded(xp, loss, kept), rounded(xp, total, kept)


@cross_entropy_of_ids.check
def ids_check(xp: ModuleType, logits: Any, labels: Any, *, ignore_index: int | None, **_: Any) -> None:
    check_class_ids(labels, logits.shape[-1], ignore_index)


cross_entropy_of_ids.ranges(lambda logits, labels, **_: [(labels, logits.shape[-1], "class id")])


@cross_entropy_of_ids.grad
def softmax_cross_entropy_grad(
    g: list[Node | None], out: tuple[Node, Node], logits: Node, labels: Node, **attrs: Any
) -> tuple[Node | None, None]:
    # the second output is private to this rule, so only the first can have a gradient
    return softmax_cross_entropy_dx(g[0], logits, labels, out[1], **attrs), None


@cross_entropy_of_ids.decompose
def softmax_cross_entropy_parts(
    logits: Node, labels: Node, *, ignore_index: int | None, label_smoothing: float
) -> tuple[Node, Node]:
    """Three sums over the classes, so that ranks which have some classes each exchange three numbers per row."""
    total = logsumexp(logits, axis=-1)
    counted, labels = _counted(labels, ignore_index)
    own = squeeze(OPS["take_along_axis"](logits, OPS["expand_dims"](labels, axis=-1), axis=-1), axis=-1)
    if label_smoothing:
        even = OPS["sum"](logits, axis=-1) * label_smoothing / logits.shape[-1]
        own = own * (1 - label_smoothing) + even
    loss = total - own
    return loss if counted is None else OPS["where"](counted, loss, OPS["zeros_like"](loss)), total


def _even(label_smoothing: float, classes: Node) -> Node:
    """The share of each of the classes on the last axis, whose number may be open."""
    return as_node(label_smoothing, [classes.dtype]) / classes.shape[-1]


def _counted(labels: Node, ignore_index: int | None) -> tuple[Node | None, Node]:
    """Which rows count (None: all), and the class ids with those of the others replaced by 0."""
    if ignore_index is None:
        return None, labels
    counted = OPS["not_equal"](labels, ignore_index)
    return counted, OPS["where"](counted, labels, OPS["zeros_like"](labels))


@op(infer=lambda g, logits, *_, **__: logits, dims="...,...v@,...,...->...v@", linear=(0,), inplace={0: (1,)})
def softmax_cross_entropy_dx(
    xp: ModuleType,
    g: Any,
    logits: Any,
    labels: Any,
    total: Any,
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    window: RowWindow = None,
) -> Any:
    """The gradient of `softmax_cross_entropy`: g (softmax(logits) - target); `total` is log(sum(exp(logits))).

    >>> import hetu as ht
    >>> logits, labels = ht.placeholder("logits", (None, 10)), ht.placeholder("labels", (None,), "int64")
    >>> ht.gradients(ht.sum(ht.softmax_cross_entropy(logits, labels)), [logits])[0].op.name
    'softmax_cross_entropy_dx'
    """
    low, _, classes = (0, 0, logits.shape[-1]) if window is None else window[0]
    wide = widened(xp, logits, total)
    softmax = xp.exp(wide - xp.expand_dims(total, axis=-1))
    own = xp.where(_one_hot(xp, wide, labels, low), xp.ones_like(wide), xp.zeros_like(wide))
    target = own * (1 - label_smoothing) + label_smoothing / classes
    if ignore_index is not None:
        g = xp.where(labels == ignore_index, xp.zeros_like(g), g)
    return rounded(xp, xp.expand_dims(g, axis=-1) * (softmax - target), logits)


@softmax_cross_entropy_dx.grad
def softmax_cross_entropy_dx_grad(
    h: Node,
    dx: Node,
    g: Node,
    logits: Node,
    labels: Node,
    total: Node,
    *,
    ignore_index: int | None,
    label_smoothing: float,
    **_: Any,
) -> tuple[Node, Node, None, None]:
    """`total` counts as a function of the logits, so its share is in the gradient of the logits."""
    softmax = OPS["exp"](logits - OPS["expand_dims"](total, axis=-1))
    counted, labels = _counted(labels, ignore_index)
    target = OPS["one_hot"](labels, depth=logits.shape[-1], dtype=logits.dtype)
    if label_smoothing:
        target = target * (1 - label_smoothing) + _even(label_smoothing, logits)
    if counted is not None:
        h = OPS["where"](OPS["expand_dims"](counted, axis=-1), h, OPS["zeros_like"](h))
    to_g = OPS["sum"](h * (softmax - target), axis=-1)
    weighed = softmax * h
    curved = weighed - softmax * OPS["sum"](weighed, axis=-1, keepdims=True)
    return to_g, OPS["expand_dims"](g, axis=-1) * curved, None, None


def _entropy_attrs(labels: TensorType, *, ignore_index: int | None, **attrs: Any) -> dict[str, Any]:
    """No row is ignored where ids cannot be `ignore_index`."""
    if ignore_index is not None and labels.dtype.kind in "iu":
        limits = np.iinfo(labels.dtype)
        ignore_index = ignore_index if limits.min <= ignore_index <= limits.max else None
    return {"ignore_index": ignore_index, **attrs}


cross_entropy_of_ids.normalize(lambda logits, labels, **attrs: _entropy_attrs(labels, **attrs))
softmax_cross_entropy_dx.normalize(lambda g, logits, labels, total, **attrs: _entropy_attrs(labels, **attrs))


keeps_numbers(astype)


# -- what users call ---------------------------------------------------------------------------------------------


@public
def softmax_cross_entropy(
    logits: Any, labels: Any, *, ignore_index: int | None = None, label_smoothing: float = 0.0
) -> Node:
    """-sum(target log(softmax(logits))) over the last axis: logits (..., classes) -> one loss per row, (...).

    `labels` are class ids, integers of the shape (...), or distributions, floats of the shape of the logits. Rows whose
    id is `ignore_index` give 0 (a mean still counts them). `label_smoothing` mixes in that share of the even
    distribution.
    ValueRangeError for an id that names no class.

    >>> import hetu as ht
    >>> loss = softmax_cross_entropy([[0.0, 0.0]], [1])
    >>> round(float(ht.evaluate(loss)[0]), 4)
    0.6931
    """
    logits, labels = as_nodes((logits, labels))
    takes_logits("softmax_cross_entropy", logits)
    if not is_float(labels.dtype) or labels.ndim != logits.ndim:
        return cross_entropy_of_ids(logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing)[0]
    _operands("softmax_cross_entropy", logits, labels)
    check_smoothing(logits.tensor, label_smoothing)
    if ignore_index is not None:
        raise ArgumentError(
            "softmax_cross_entropy: ignore_index needs class ids, the labels are distributions",
            fix="leave it out and multiply the losses by a mask",
        )
    takes_probabilities("softmax_cross_entropy", labels)
    if label_smoothing:
        labels = labels * (1 - label_smoothing) + _even(label_smoothing, labels)
    return -OPS["sum"](labels * OPS["log_softmax"](logits, axis=-1), axis=-1)


@public
def nll_loss(log_probs: Any, labels: Any) -> Node:
    """-log_probs[..., label]: log probabilities (..., classes) and class ids (...) -> (...).

    >>> import hetu as ht
    >>> ht.evaluate(nll_loss([[-0.5, -1.0]], [1])).tolist()
    [1.0]
    """
    log_probs, labels = as_nodes((log_probs, labels))
    try:
        check_labels(log_probs.tensor, labels.tensor)
    except (ShapeError, DTypeError) as error:
        error.message = f"nll_loss({log_probs.type}, {labels.type}): {error.message}"
        raise
    places = OPS["expand_dims"](labels, axis=-1)
    return -squeeze(OPS["take_along_axis"](log_probs, places, axis=-1), axis=-1)


def _operands(name: str, predicted: Any, target: Any) -> tuple[Node, Node]:
    """Both as nodes. ShapeError unless they have one shape: (n, 1) against (n,) would silently become (n, n)."""
    predicted, target = as_nodes((predicted, target))
    if not is_float(predicted.dtype):
        raise DTypeError(f"{name}: predictions are {predicted.type}, wanted floats", fix="pass the output of a model")
    a, b = predicted.shape, target.shape
    if fit(a, b):
        return predicted, target
    fix = "give both the same shape; a loss does not broadcast"
    if len(a) == len(b) + 1 and fit(a, (*b, 1)):
        fix = "drop the last axis of the predictions with ht.squeeze(predictions, axis=-1)"
    elif len(b) == len(a) + 1 and fit(b, (*a, 1)):
        fix = "drop the last axis of the targets with ht.squeeze(targets, axis=-1)"
    raise ShapeError(f"{name}: predictions are {predicted.type}, targets {target.type}; they must be equal", fix=fix)


@public
def binary_cross_entropy_with_logits(logits: Any, targets: Any) -> Node:
    """-t log(sigmoid(x)) - (1 - t) log(sigmoid(-x)) for each element; targets are 0 to 1, of the shape of the logits.

    Computed as softplus(x) - t x, which neither overflows nor loses digits.

    >>> import hetu as ht
    >>> round(float(ht.evaluate(binary_cross_entropy_with_logits([0.0], [1.0]))[0]), 4)
    0.6931
    """
    x, t = _operands("binary_cross_entropy_with_logits", logits, targets)
    takes_logits("binary_cross_entropy_with_logits", x)
    takes_probabilities("binary_cross_entropy_with_logits", t)
    return OPS["softplus"](x) - t * x


@public
def mse_loss(predictions: Any, targets: Any) -> Node:
    """(prediction - target)^2 for each element.

    >>> import hetu as ht
    >>> ht.evaluate(mse_loss([1.0, 2.0], [0.0, 4.0])).tolist()
    [1.0, 4.0]
    """
    predictions, targets = _operands("mse_loss", predictions, targets)
    return OPS["square"](predictions - targets)


@public
def mae_loss(predictions: Any, targets: Any) -> Node:
    """|prediction - target| for each element.

    >>> import hetu as ht
    >>> ht.evaluate(mae_loss([1.0, 2.0], [0.0, 4.0])).tolist()
    [1.0, 2.0]
    """
    predictions, targets = _operands("mae_loss", predictions, targets)
    return OPS["abs"](predictions - targets)


@public
def huber_loss(predictions: Any, targets: Any, delta: float = 1.0) -> Node:
    """d^2 / 2 where the error |d| is at most `delta`, else delta (|d| - delta / 2), for each element.

    P. J. Huber, "Robust Estimation of a Location Parameter", 1964.

    >>> import hetu as ht
    >>> ht.evaluate(huber_loss([1.0, 4.0], [0.0, 0.0])).tolist()
    [0.5, 3.5]
    """
    predictions, targets = _operands("huber_loss", predictions, targets)
    if not delta > 0:
        raise ArgumentError(f"huber_loss: delta={delta!r}", fix="pass a delta above 0")
    error = OPS["abs"](predictions - targets)
    near = OPS["minimum"](error, delta)
    return near * (error - 0.5 * near)


@public
def kl_divergence(log_probs: Any, targets: Any) -> Node:
    """t (log t - log p) for each element; sum over the last axis for KL(t || p). Elements with t = 0 give 0.

    `log_probs` are log probabilities, `targets` probabilities of the same shape.

    >>> import hetu as ht
    >>> ht.evaluate(kl_divergence([-1.0, -2.0], [1.0, 0.0])).tolist()
    [1.0, 0.0]
    """
    log_probs, targets = _operands("kl_divergence", log_probs, targets)
    takes_probabilities("kl_divergence", targets)
    absent = OPS["equal"](targets, 0)
    safe = OPS["where"](absent, 1, targets)
    return OPS["where"](absent, 0, targets * (OPS["log"](safe) - log_probs))
