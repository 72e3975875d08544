"""LLaMA: a decoder with RMS norms, rotary positions, gated feed-forward parts, and fewer keys than queries.

`load` reads published checkpoints of LLaMA 1 to 3; `hetu.generation` writes with it. Left out: scaled rotary positions.
"""

from __future__ import annotations

import os
from typing import Any

from .. import nn, ops
from ..answers import answer_calls as _answer_calls
from ..core.errors import ArgumentError, CheckpointError
from ..core.graph import Node
from ..data.weights import PublishedWeights
from ..nn.attention import Past, check_heads, heads_of, joined, rotated, rotation
from ..ranges import AtLeast1, Layers, Positive

__all__ = ["Llama", "load"]


class Llama(nn.NamedModel):
    """(n, length) ids -> (n, length, vocabulary) logits of the next ones; with `past` they go on from what was read.

    H. Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, section 2.2: in each layer
    h += attention(norm(h)), h += W_down (silu(W_gate norm(h)) * W_up norm(h)), N. Shazeer, "GLU Variants Improve
    Transformer", 2020, eq. 6. Each of `key_heads` heads of keys and values serves heads / key_heads of queries,
    J. Ainslie et al., "GQA", 2023, section 2.2. `tied`: the table of words is that of the output.

    >>> import hetu as ht
    >>> Llama(100, 16, 1, 4, key_heads=2)(ht.placeholder("ids", (None, 10), "int64")).shape[1:]
    (10, 100)
    """

    prefix = "model."
    ignored = r"\.rotary_emb\.inv_freq$"

    def __init__(
        self,
        vocabulary: AtLeast1,
        features: AtLeast1 = 4096,
        layers: Layers = 32,
        heads: AtLeast1 = 32,
        *,
        key_heads: AtLeast1 | None = None,
        hidden: AtLeast1 | None = None,
        head_features: AtLeast1 | None = None,
        theta: Positive = 10000.0,
        epsilon: Positive = 1e-6,
        tied: bool = False,
        published: PublishedWeights | None = None,
        name: str | None = None,
    ) -> None:
        check_heads(heads, key_heads or heads)
        super().__init__(published, name)
        self.layers, self.heads, self.key_heads = layers, heads, key_heads or heads
        self.theta, self.epsilon, self.tied = theta, epsilon, tied
        self.head_features = width = head_features or features // heads
        hidden = hidden or 8 * features // 3
        if width % 2:
            raise ArgumentError(f"heads of {width} features", fix="choose an even number, whose pairs can turn")
        self._table("embed_tokens", vocabulary, features)
        for h in (f"layers.{n}" for n in range(layers)):
            self._norm(f"{h}.input_layernorm", features, bias=False)
            self._linear(f"{h}.self_attn.q_proj", features, heads * width, bias=False)
            self._linear(f"{h}.self_attn.k_proj", features, self.key_heads * width, bias=False)
            self._linear(f"{h}.self_attn.v_proj", features, self.key_heads * width, bias=False)
            self._linear(f"{h}.self_attn.o_proj", heads * width, features, bias=False)
            self._norm(f"{h}.post_attention_layernorm", features, bias=False)
            self._linear(f"{h}.mlp.gate_proj", features, hidden, bias=False)
            self._linear(f"{h}.mlp.up_proj", features, hidden, bias=False)
            self._linear(f"{h}.mlp.down_proj", hidden, features, bias=False)
        self._norm("norm", features, bias=False)
        if not tied:
            self._linear("lm_head", features, vocabulary, bias=False)
        self._declared()

    def forward(self, ids: Node, past: Past | None = None) -> Node:
        table = self.weights["embed_tokens.weight"]
        turns = rotation(ops.arange(ids.shape[1]) if past is None else past.positions, self.head_features, self.theta)
        x = ops.embedding(table, ids)
        for h in (f"layers.{n}" for n in range(self.layers)):
            x = x + self._attention(self._scaled(x, f"{h}.input_layernorm"), f"{h}.self_attn", turns, past)
            y = self._scaled(x, f"{h}.post_attention_layernorm")
            gated = ops.silu(self.linear(y, f"{h}.mlp.gate_proj")) * self.linear(y, f"{h}.mlp.up_proj")
            x = x + self.linear(gated, f"{h}.mlp.down_proj")
        x = self._scaled(x, "norm")
        return x @ ops.matrix_transpose(table) if self.tied else self.linear(x, "lm_head")

    def _scaled(self, x: Node, name: str) -> Node:
        return ops.rms_norm(x, self.weights[f"{name}.weight"], epsilon=self.epsilon)

    def _attention(self, x: Node, h: str, turns: tuple[Node, Node], past: Past | None) -> Node:
        q = rotated(heads_of(self.linear(x, f"{h}.q_proj"), self.heads), turns)
        k = rotated(heads_of(self.linear(x, f"{h}.k_proj"), self.key_heads), turns)
        v = heads_of(self.linear(x, f"{h}.v_proj"), self.key_heads)
        if past is not None:
            k, v = past.extended(k), past.extended(v)
        if (shared := self.heads // self.key_heads) > 1:
            k, v = (ops.repeat(y, shared, axis=1) for y in (k, v))
        mask, causal = (None, True) if past is None else (past.mask, False)
        return self.linear(joined(ops.scaled_dot_product_attention(q, k, v, mask, causal=causal)), f"{h}.o_proj")


def load(path: str | os.PathLike[str], *, name: str | None = None, **sizes: Any) -> Llama:
    """The model of a published checkpoint, a safetensors file or its folder; an executor then reads the numbers.

    Sizes follow from the shapes, and from `config.json` beside the file what does not: heads, epsilon, theta. `sizes`
    come before both. CheckpointError, with a table, if names or shapes are not those of LLaMA.

    >>> import hetu as ht
    >>> ht.models.llama.load("Llama-2-7b")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    CheckpointError: there is no file of weights 'Llama-2-7b'
    """
    found, prefix = PublishedWeights(path), Llama.prefix
    scaled = found.settings.get("rope_scaling") or found.settings.get("rope_parameters") or {}
    if (kind := scaled.get("rope_type", scaled.get("type", "default"))) != "default":
        raise CheckpointError(
            f"config.json asks for rotary positions scaled by {kind!r}, which are not built", fix="load a plain one"
        )
    vocabulary, features = found.shape("embed_tokens.weight", prefix)
    rows = {
        part: found.shape(f"layers.0.{part}_proj.weight", prefix)[0]
        for part in ("self_attn.q", "self_attn.k", "mlp.up")
    }
    known = {"heads": "num_attention_heads", "epsilon": "rms_norm_eps", "theta": "rope_theta"}
    asked = found.sizes(known, {"epsilon": 1e-6, "theta": scaled.get("rope_theta", 10000.0)}, sizes)
    check_heads(rows["self_attn.q"], asked["heads"])
    width = rows["self_attn.q"] // asked["heads"]
    shapes = {"head_features": width, "key_heads": rows["self_attn.k"] // width, "hidden": rows["mlp.up"]}
    asked = {**shapes, "tied": "lm_head.weight" not in found, **asked}
    return Llama(vocabulary, features, found.layers(r"\blayers\.(\d+)\."), published=found, name=name, **asked)


_answer_calls(__name__)
