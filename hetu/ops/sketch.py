"""A sketch of which ids matter most: buckets with a few ids and their scores each.

`heeded` passes vectors on; where a step trains by their gradient, the sketch hears how large it is.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import to_numpy
from ..core.errors import ShapeError
from ..core.graph import Node
from ..core.op import Role, op
from ..core.operators import with_updates
from ..core.types import TensorType, axis_letters, compatible, numbers
from .index import check_range, require_indices
from .reduction import norm


def _sketch_types(*types: TensorType) -> tuple[TensorType, TensorType]:
    keys, scores, buckets, ids, norms = types
    for type_ in (keys, buckets, ids):
        require_indices(type_)
    pairs = [(keys, scores), (ids, buckets), (ids, norms)]
    if keys.ndim != 2 or not all(a.ndim == b.ndim and all(map(compatible, a.shape, b.shape)) for a, b in pairs):
        said = f"keys are {keys}, scores {scores}; ids {ids}, their buckets {buckets} and norms {norms}"
        raise ShapeError(said, fix="give keys and scores one shape (buckets, slots), and the others another")
    return keys, scores


def _sketch_dims(*types: TensorType) -> str:
    """All ranks hear all ids."""
    ids = "".join(f"{letter}!" for letter in axis_letters(types[-1].ndim))
    return f"y!z!,y!z!,{ids},{ids},{ids}->y!z!,y!z!"


@op(infer=_sketch_types, dims=_sketch_dims, differentiable=False)
def sketched(xp: ModuleType, keys: Any, scores: Any, buckets: Any, ids: Any, norms: Any) -> tuple[Any, Any]:
    """New keys and scores (buckets, slots), when ids (...) in their buckets have been heard, each as loud as its norm.

    An id that is there adds to its score. Another takes the place of the least, and adds to that score, as in
    SpaceSaving (A. Metwally et al., ICDT 2005); of one call as many as a bucket has slots, the loudest. Key -1 is none.

    >>> import hetu as ht
    >>> keys, scores = sketched([[5, -1]], [[2.0, 0.0]], [0, 0], [5, 7], [1.0, 4.0])
    >>> ht.evaluate(keys).tolist(), ht.evaluate(scores).tolist()
    ([[5, 7]], [[3.0, 4.0]])
    """
    kept, score = np.array(to_numpy(keys)), np.array(to_numpy(scores))
    new, first, of = np.unique(to_numpy(ids), return_index=True, return_inverse=True)
    heard = np.bincount(of.reshape(-1), np.ravel(to_numpy(norms)), len(new)).astype(score.dtype)
    bucket = np.ravel(to_numpy(buckets))[first]
    there = kept[bucket] == new[:, None]
    known = there.any(axis=1)
    score[bucket[known], there[known].argmax(axis=1)] += heard[known]
    rest = np.flatnonzero(~known)
    rest = rest[np.lexsort((-heard[rest], bucket[rest]))]  # the loudest of each bucket first
    for _ in range(kept.shape[1]):
        _, turn = np.unique(bucket[rest], return_index=True)
        heads, rest = rest[turn], np.delete(rest, turn)
        place = score[bucket[heads]].argmin(axis=1)
        kept[bucket[heads], place] = new[heads]
        score[bucket[heads], place] += heard[heads]
    return xp.asarray(kept), xp.asarray(score)


sketched.flops(lambda y, keys, scores, buckets, ids, norms: int(ids.size) * 5 + int(keys.size))
sketched.check(lambda xp, keys, scores, buckets, ids, norms: check_range(xp, buckets, keys.shape[0], "bucket"))


def _heeded_type(x: TensorType, buckets: TensorType, ids: TensorType, *sketch: TensorType) -> TensorType:
    _sketch_types(*sketch, buckets, ids, TensorType(x.shape[:-1], x.dtype))
    return numbers(x)


@op(role=Role.MOVE, infer=_heeded_type, dims="...d,...,...,y!z!,y!z!->...d")
def heeded(xp: ModuleType, x: Any, buckets: Any, ids: Any, keys: Any, scores: Any) -> Any:
    """The vectors x (..., width) of ids (...) as they are. A step that trains by their gradient enters its norms.

    `keys` and `scores` (buckets, slots) are variables, which `sketched` then updates.

    >>> import hetu as ht
    >>> keys, scores = ht.variable("keys", -1, (1, 2), "int64", trainable=False), ht.variable("scores", 0, (1, 2))
    >>> heeded(ht.placeholder("x", (3, 8)), [0, 0, 0], [1, 2, 1], keys, scores).shape
    (3, 8)
    """
    return x


heeded.view(lambda xp, x, *_: x)


@heeded.grad
def heeded_grad(g: Node, y: Node, x: Node, buckets: Node, ids: Node, keys: Node, scores: Node) -> tuple[Any, ...]:
    if keys.role is Role.VARIABLE:
        made = sketched(keys, scores, buckets, ids, norm(g, axis=-1))
        g = with_updates(g, dict(zip((keys, scores), made)))
    return g, None, None, None, None
