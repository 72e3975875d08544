"""Streaming metrics equal a brute-force computation over all batches at once."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu import metrics
from hetu.core.errors import DataError, DTypeError, ShapeError, ValueRangeError


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def fed(metric, predicted, labels, parts=4):
    for p, t in zip(np.array_split(predicted, parts), np.array_split(labels, parts)):
        metric.update(p, t)
    return metric


def test_auc_counts_every_pair_and_half_of_the_ties(rng):
    scores, labels = rng.integers(0, 12, 200) / 4, rng.integers(0, 2, 200)
    gaps = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    wanted = ((gaps > 0) + 0.5 * (gaps == 0)).mean()
    assert fed(metrics.AUC(), scores, labels).result() == pytest.approx(wanted, abs=1e-12)


def test_auc_needs_both_classes_and_finite_ranks():
    metric = metrics.AUC()
    metric.update([0.3, 0.4], [1, 1])
    with pytest.raises(DataError, match="both classes"):
        metric.result()
    with pytest.raises(ValueRangeError, match="NaN"):
        metric.update([np.nan], [1])
    with pytest.raises(ValueRangeError, match="0 or 1"):
        metric.update([0.1], [2])
    with pytest.raises(ShapeError, match="scores"):
        metric.update([[0.1, 0.9]], [1])


def test_accuracy_of_scores_and_of_ids(rng):
    scores, labels = rng.normal(size=(50, 3)), rng.integers(0, 3, 50)
    wanted = (scores.argmax(1) == labels).mean()
    assert fed(metrics.Accuracy(), scores, labels).result() == pytest.approx(wanted)
    assert fed(metrics.Accuracy(), scores.argmax(1), labels).result() == pytest.approx(wanted)
    node = metrics.accuracy(ht.placeholder("scores", (None, 3)), ht.placeholder("labels", (None,), "int64"))
    assert node.shape == () and node.dtype == np.float32
    assert float(ht.evaluate(metrics.accuracy(scores, labels))) == pytest.approx(wanted)


def test_graph_accuracy_rejects_other_shapes():
    with pytest.raises(ShapeError, match="labels"):
        metrics.accuracy(ht.placeholder("scores", (8, 3)), ht.placeholder("labels", (8, 3), "int64"))


@pytest.mark.parametrize("classes", [2, 4])
def test_precision_recall_and_f_score(rng, classes):
    predicted, labels = rng.integers(0, classes, 300), rng.integers(0, classes, 300)
    both = [((predicted == k) & (labels == k)).sum() for k in range(classes)]
    precision = [b / (predicted == k).sum() for k, b in enumerate(both)]
    recall = [b / (labels == k).sum() for k, b in enumerate(both)]
    f2 = [5 * p * r / (4 * p + r) for p, r in zip(precision, recall)]
    for metric, each in (
        (metrics.Precision(classes), precision),
        (metrics.Recall(classes), recall),
        (metrics.FScore(classes, beta=2.0), f2),
    ):
        wanted = each[1] if classes == 2 else np.mean(each)
        assert fed(metric, predicted, labels).result() == pytest.approx(wanted)


def test_a_class_never_seen_counts_zero():
    metric = metrics.Precision(3)
    metric.update([0, 1], [0, 1])
    assert metric.result() == pytest.approx(2 / 3)


def test_confusion_matrix_counts_and_prints():
    matrix = metrics.ConfusionMatrix(3)
    matrix.update([0, 2, 2], [0, 1, 2])
    matrix.update(np.array([[0.1, 0.7, 0.2]]), [1])
    assert matrix.result().tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    lines = str(matrix).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert lines[2].split() == ["1", "0", "1", "1"]
    with pytest.raises(ValueRangeError, match="from 3 to 3"):
        matrix.update([0], [3])
    with pytest.raises(DTypeError, match="class ids"):
        matrix.update([0.9], [1])


def test_reset_and_empty():
    for metric in (metrics.Mean(), metrics.Accuracy(), metrics.AUC(), metrics.Recall()):
        with pytest.raises(DataError, match="no examples"):
            metric.result()
    mean = metrics.Mean()
    mean.update([1.0, 2.0], weight=2)
    mean.update(6.0, weight=4)
    assert mean.result() == pytest.approx(30 / 8) and len(mean) == 3
    mean.reset()
    mean.update(5.0)
    assert mean.result() == 5.0 and "5.0" in repr(mean)
