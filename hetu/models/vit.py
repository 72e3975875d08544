"""Vision transformers: an image as a row of patches, which attend to each other."""

from __future__ import annotations

import numpy as np

from .. import nn, ops
from ..answers import answer_calls as _answer_calls
from ..core.graph import Node
from ..nn.layer import width
from ..ranges import AtLeast1, Beta, Layers

__all__ = ["vit"]


def vit(
    x: Node,
    classes: AtLeast1,
    *,
    patch: AtLeast1 = 4,
    features: AtLeast1 = 64,
    layers: Layers = 3,
    heads: AtLeast1 = 4,
    dropout: Beta = 0.0,
) -> Node:
    """Images (n, channels, height, width) to logits (n, classes): patches of `patch` x `patch` are the words.

    A. Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021, eq. 1-4: h = [class; patches E] + positions, blocks
    with norms in front, and a linear map of the norm of the first place. Class and first position are one vector.

    >>> import hetu as ht
    >>> vit(ht.placeholder("x", (None, 3, 32, 32)), 10).shape[1]
    10
    """
    parts = nn.Conv2d(width(x), features, patch, stride=patch, name="patches")(x)
    count = width(parts, 2) * width(parts, 3)
    words = ops.permute_dims(ops.reshape(parts, shape=(x.shape[0], features, count)), (0, 2, 1))
    places = nn.Embedding(1 + count, features, name="positions")(np.arange(1 + count))
    h = ops.pad(words, pad_width=((0, 0), (1, 0), (0, 0))) + places
    for _ in range(layers):
        h = nn.TransformerBlock(features, heads, dropout=dropout)(h)
    return nn.Linear(features, classes)(nn.LayerNorm(features)(h[:, 0]))


_answer_calls(__name__)
