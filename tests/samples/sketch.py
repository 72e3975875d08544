"""Rows for the sketch of ids that matter most; the reference hears one id after the other."""

from __future__ import annotations

import numpy as np

from hetu.ops.sketch import heeded, sketched

from . import Sample, given, positive, real

KEYS = given(np.array([[3, 8, -1], [4, 1, 6], [-1, -1, -1]]))
SCORES = given(np.array([[2.0, 0.5, 0.0], [1.0, 4.0, 3.0], [0.0, 0.0, 0.0]]))
IDS = np.array([[3, 9, 5, 5], [7, 3, 2, 2]])
BUCKETS = np.array([[0, 0, 1, 1], [1, 0, 2, 2]])


def one_by_one(keys, scores, buckets, ids, norms):
    """SpaceSaving: those that are there first, then newcomers, the loudest first."""
    keys, scores, heard = keys.copy(), scores.copy(), {}
    for bucket, key, norm in zip(buckets.ravel(), ids.ravel(), norms.ravel()):
        heard[bucket, key] = heard.get((bucket, key), 0.0) + norm
    for bucket, key in [at for at in heard if at[1] in keys[at[0]]]:
        scores[bucket, [*keys[bucket]].index(key)] += heard.pop((bucket, key))
    for (bucket, key), norm in sorted(heard.items(), key=lambda item: -item[1]):
        least = min(range(3), key=lambda slot: scores[bucket, slot])
        keys[bucket, least], scores[bucket, least] = key, scores[bucket, least] + norm
    return keys, scores


NUMPY = "it works on the host"
SKETCH = (KEYS, SCORES, given(BUCKETS), given(IDS))
SAMPLES = [
    Sample("sketched", sketched, (*SKETCH, positive(2, 4)), one_by_one, order=0, strict=NUMPY),
    Sample("heeded", heeded, (real(2, 4, 3), given(BUCKETS), given(IDS), KEYS, SCORES), lambda x, *_: x),
]
