"""Topics of documents."""

from __future__ import annotations

from functools import partial

import hetu as ht
from tests.ml import Row

ROWS = [
    Row(
        "LatentDirichletAllocation",
        partial(ht.ml.LatentDirichletAllocation, 3, max_iter=20),
        answers=("components_", "transform"),
        equal=1e-9,
    ),
]
