"""GPT-2: a decoder with learned positions, norms before each part, and the table of words as output weights.

`load` reads published checkpoints; `hetu.generation` writes with it.
"""

from __future__ import annotations

import os
from typing import Any

from .. import nn, ops
from ..answers import answer_calls as _answer_calls
from ..core.graph import Node
from ..data.weights import PublishedWeights
from ..nn.attention import Past, check_heads, heads_of, joined
from ..ranges import AtLeast1, Beta, Layers, Positive

__all__ = ["GPT2", "load"]
QKV = "query", "key", "value"  # which files hold as one map, `c_attn`


class GPT2(nn.NamedModel):
    """(n, length) ids -> (n, length, vocabulary) logits of the next ones.

    A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3:
    h = wte[ids] + wpe[positions]; in each layer h += attention(norm(h)), h += W2 gelu(W1 norm(h));
    logits = norm(h) wte^T. With `past`, the ids go on from what was read before. `dropout` is of embeddings and of
    both parts.

    >>> import hetu as ht
    >>> GPT2(100, 16, 1, 2)(ht.placeholder("ids", (None, 10), "int64")).shape[1:]
    (10, 100)
    """

    prefix, outputs_first = "transformer.", False
    ignored = r"\.attn\.(masked_)?bias$|^lm_head\.weight$"  # the causal mask; the table of words once more

    def __init__(
        self,
        vocabulary: AtLeast1,
        features: AtLeast1 = 768,
        layers: Layers = 12,
        heads: AtLeast1 = 12,
        *,
        positions: AtLeast1 = 1024,
        dropout: Beta = 0.0,
        epsilon: Positive = 1e-5,
        published: PublishedWeights | None = None,
        name: str | None = None,
    ) -> None:
        check_heads(features, heads)
        super().__init__(published, name)
        self.layers, self.heads, self.dropout, self.epsilon = layers, heads, dropout, epsilon
        self.head_features, self.key_heads = features // heads, heads
        self._table("wte", vocabulary, features)
        self._table("wpe", positions, features)
        for h in (f"h.{n}" for n in range(layers)):
            self._norm(f"{h}.ln_1", features)
            self._linear(f"{h}.attn.c_attn", features, features, parts=QKV)
            self._linear(f"{h}.attn.c_proj", features, features)
            self._norm(f"{h}.ln_2", features)
            self._linear(f"{h}.mlp.c_fc", features, 4 * features)
            self._linear(f"{h}.mlp.c_proj", 4 * features, features)
        self._norm("ln_f", features)
        self._declared()

    def forward(self, ids: Node, past: Past | None = None) -> Node:
        table = self.weights["wte.weight"]
        positions = ops.arange(ids.shape[1]) if past is None else past.positions
        x = self._drop(ops.embedding(table, ids) + ops.embedding(self.weights["wpe.weight"], positions), past)
        for h in (f"h.{n}" for n in range(self.layers)):
            x = x + self._drop(self._attention(self.layer_norm(x, f"{h}.ln_1", self.epsilon), h, past), past)
            y = self.linear(self.layer_norm(x, f"{h}.ln_2", self.epsilon), f"{h}.mlp.c_fc")
            x = x + self._drop(self.linear(ops.gelu(y, "tanh"), f"{h}.mlp.c_proj"), past)
        return self.layer_norm(x, "ln_f", self.epsilon) @ ops.matrix_transpose(table)

    def _attention(self, x: Node, h: str, past: Past | None) -> Node:
        q, k, v = (heads_of(self.linear(x, f"{h}.attn.c_attn.{part}"), self.heads) for part in QKV)
        if past is None:
            seen = ops.scaled_dot_product_attention(q, k, v, causal=True)
        else:
            seen = ops.scaled_dot_product_attention(q, past.extended(k), past.extended(v), past.mask)
        return self.linear(joined(seen), f"{h}.attn.c_proj")

    def _drop(self, x: Node, past: Past | None) -> Node:
        return ops.dropout(x, self.dropout) if self.dropout and past is None else x


def load(path: str | os.PathLike[str], *, name: str | None = None, **sizes: Any) -> GPT2:
    """The model of a published checkpoint, a safetensors file or its folder; an executor then reads the numbers.

    Sizes follow from the shapes, and from `config.json` beside the file what does not: heads, epsilon. `sizes` come
    before both. CheckpointError, with a table, if names or shapes are not those of GPT-2.

    >>> import hetu as ht
    >>> ht.models.gpt2.load("gpt2")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    CheckpointError: there is no file of weights 'gpt2'
    """
    found, prefix = PublishedWeights(path), GPT2.prefix
    vocabulary, features = found.shape("wte.weight", prefix)
    known = {"heads": "n_head", "epsilon": "layer_norm_epsilon"}
    asked = {"positions": found.shape("wpe.weight", prefix)[0], **found.sizes(known, {"epsilon": 1e-5}, sizes)}
    return GPT2(vocabulary, features, found.layers(r"\bh\.(\d+)\."), published=found, name=name, **asked)


_answer_calls(__name__)
