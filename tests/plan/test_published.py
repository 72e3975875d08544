"""Steps that others have published beside simulated ones: `examples/benchmarks/published.py`."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

import hetu as ht

BENCHMARKS = Path(__file__).parent.parent.parent / "examples" / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    published = importlib.import_module("published")


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", published.ROWS)
def test_a_step_is_foretold_to_a_fifth(name):
    pytest.importorskip("ml_dtypes")
    row = published.ROWS[name]
    assert row.simulated()[1] == pytest.approx(row.took, rel=0.2)


def test_attention_that_writes_its_scores_is_attention(monkeypatch):
    """Without dropout; values and gradients, which the step commits because only a step that trains drops."""
    monkeypatch.setattr(published, "DROPOUT", 0.0)
    results = []
    for attended in (published.attended, lambda *x: ht.scaled_dot_product_attention(*x, causal=True)):
        with ht.scope("attended"):
            x = [ht.variable(name, ht.init.normal(1.0), (2, 3, 5, 4)) for name in "qkv"]
            y = attended(*x)
        slopes = ht.gradients(ht.sum(y**2), x)
        results.append(ht.Executor([y, *slopes, dict(zip(x, slopes))]).run({}))
    for ours, theirs in zip(*(found[:-1] for found in results), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
