"""Loss functions. Each returns one loss per sample or element: write `ht.mean(...)` around it.

Predictions and targets must have equal shapes; unlike arithmetic, a loss never broadcasts. Only the cross entropy of
class ids is an operator (with its gradient in one more); the others are compositions. For weights per class or sample,
multiply; for a reduction, call one.
"""

from __future__ import annotations

from typing import Any

from ..core.errors import ArgumentError, DTypeError, ShapeError, public
from ..core.graph import OPS, Node
from ..core.op import as_nodes
from ..core.types import is_float
from .cross_entropy import check_labels, check_smoothing, cross_entropy_of_ids, fit
from .shape import squeeze

__all__ = [
    "binary_cross_entropy_with_logits",
    "huber_loss",
    "kl_divergence",
    "mae_loss",
    "mse_loss",
    "nll_loss",
    "softmax_cross_entropy",
]


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
    if not is_float(labels.dtype) or labels.ndim != logits.ndim:
        return cross_entropy_of_ids(logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing)[0]
    _check_alike("softmax_cross_entropy", logits, labels)
    check_smoothing(label_smoothing)
    if ignore_index is not None:
        raise ArgumentError(
            "softmax_cross_entropy: ignore_index needs class ids, the labels are distributions",
            fix="leave it out and multiply the losses by a mask",
        )
    if label_smoothing:
        labels = labels * (1 - label_smoothing) + label_smoothing / int(logits.shape[-1])
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


def _check_alike(name: str, predicted: Node, target: Node) -> None:
    """ShapeError unless both have one shape: (n, 1) against (n,) would silently become (n, n)."""
    for node in (predicted, target):
        if not is_float(node.dtype) and node is predicted:
            raise DTypeError(f"{name}: predictions are {node.type}, wanted floats", fix="pass the output of a model")
    a, b = predicted.shape, target.shape
    if fit(a, b):
        return
    fix = "give both the same shape; a loss does not broadcast"
    if len(a) == len(b) + 1 and fit(a, (*b, 1)):
        fix = "drop the last axis of the predictions with ht.squeeze(predictions, axis=-1)"
    elif len(b) == len(a) + 1 and fit(b, (*a, 1)):
        fix = "drop the last axis of the targets with ht.squeeze(targets, axis=-1)"
    raise ShapeError(f"{name}: predictions are {predicted.type}, targets {target.type}; they must be equal", fix=fix)


def _operands(name: str, predicted: Any, target: Any) -> tuple[Node, Node]:
    predicted, target = as_nodes((predicted, target))
    _check_alike(name, predicted, target)
    return predicted, target


@public
def binary_cross_entropy_with_logits(logits: Any, targets: Any) -> Node:
    """-t log(sigmoid(x)) - (1 - t) log(sigmoid(-x)) for each element; targets are 0 to 1, of the shape of the logits.

    Computed as softplus(x) - t x, which neither overflows nor loses digits.

    >>> import hetu as ht
    >>> round(float(ht.evaluate(binary_cross_entropy_with_logits([0.0], [1.0]))[0]), 4)
    0.6931
    """
    x, t = _operands("binary_cross_entropy_with_logits", logits, targets)
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
    present = OPS["greater"](targets, 0)
    safe = OPS["where"](present, targets, OPS["ones_like"](targets))
    return OPS["where"](present, targets * (OPS["log"](safe) - log_probs), OPS["zeros_like"](targets))
