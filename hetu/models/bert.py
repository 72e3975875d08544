"""BERT: an encoder that sees both sides, with norms behind each part, and heads for masked words and for classes.

`load` reads published checkpoints; `NamedModel.adapt` fine-tunes by low-rank updates.
"""

from __future__ import annotations

import os
from typing import Any

from .. import nn, ops
from ..answers import answer_calls as _answer_calls
from ..core.graph import Node
from ..data.weights import PublishedWeights
from ..nn.attention import check_heads, heads_of, joined
from ..ranges import AtLeast1, Beta, Layers, Positive

__all__ = ["BERT", "load"]


class BERT(nn.NamedModel):
    """(n, length) ids -> (n, length, features); `words` and `chances` make logits of it. `mask` is True at real ids.

    J. Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019, section 3: h = norm(the sum of
    three tables), in each layer h = norm(h + attention(h)), h = norm(h + W2 gelu(W1 h)), A. Vaswani et al., 2017,
    section 3.1. `kinds` (n, length) says which of two sentences an id is of, by default the first. Of packed texts, a
    mask (n, length, length) says what each place sees, `places` where in its text an id stands. `classes` adds a
    head for them.

    >>> import hetu as ht
    >>> model = BERT(100, 16, 1, 2, classes=3)
    >>> x = model(ht.placeholder("ids", (None, 10), "int64"), mask=ht.placeholder("mask", (None, 10), "bool"))
    >>> x.shape[1:], model.words(x).shape[1:], model.chances(x).shape[1]
    ((10, 16), (10, 100), 3)
    """

    prefix = "bert."
    drawn = ("pooler.", "cls.", "classifier.")
    ignored = r"^cls\.seq_relationship\.|^cls\.predictions\.decoder\.|embeddings\.position_ids$"

    def __init__(
        self,
        vocabulary: AtLeast1,
        features: AtLeast1 = 768,
        layers: Layers = 12,
        heads: AtLeast1 = 12,
        *,
        hidden: AtLeast1 | None = None,
        positions: AtLeast1 = 512,
        kinds: AtLeast1 = 2,
        classes: AtLeast1 | None = None,
        dropout: Beta = 0.0,
        epsilon: Positive = 1e-12,
        published: PublishedWeights | None = None,
        name: str | None = None,
    ) -> None:
        check_heads(features, heads)
        super().__init__(published, name)
        self.layers, self.heads, self.classes = layers, heads, classes
        self.dropout, self.epsilon, hidden = dropout, epsilon, hidden or 4 * features
        for table, count in (("word", vocabulary), ("position", positions), ("token_type", kinds)):
            self._table(f"embeddings.{table}_embeddings", count, features)
        self._norm("embeddings.LayerNorm", features)
        for h in (f"encoder.layer.{n}" for n in range(layers)):
            for part in ("self.query", "self.key", "self.value", "output.dense"):
                self._linear(f"{h}.attention.{part}", features, features)
            self._norm(f"{h}.attention.output.LayerNorm", features)
            self._linear(f"{h}.intermediate.dense", features, hidden)
            self._linear(f"{h}.output.dense", hidden, features)
            self._norm(f"{h}.output.LayerNorm", features)
        self._linear("pooler.dense", features, features)
        self._linear("cls.predictions.transform.dense", features, features)
        self._norm("cls.predictions.transform.LayerNorm", features)
        self._vector("cls.predictions.bias", vocabulary)
        if classes:
            self._linear("classifier", features, classes)
        self._declared()

    def forward(
        self, ids: Node, mask: Node | None = None, kinds: Node | None = None, places: Node | None = None
    ) -> Node:
        tables = {
            name: self.weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        }
        x = ops.embedding(tables["word"], ids) + ops.embedding(
            tables["position"], ops.arange(ids.shape[1]) if places is None else places
        )
        x = x + (tables["token_type"][0] if kinds is None else ops.embedding(tables["token_type"], kinds))
        x = self._drop(self.layer_norm(x, "embeddings.LayerNorm", self.epsilon))
        seen = None if mask is None else mask[:, None, None, :] if mask.ndim == 2 else mask[:, None]
        for h in (f"encoder.layer.{n}" for n in range(self.layers)):
            q, k, v = (
                heads_of(self.linear(x, f"{h}.attention.self.{p}"), self.heads) for p in ("query", "key", "value")
            )
            y = joined(ops.scaled_dot_product_attention(q, k, v, seen))
            x = self._added(x, self.linear(y, f"{h}.attention.output.dense"), f"{h}.attention.output")
            y = ops.gelu(self.linear(x, f"{h}.intermediate.dense"))
            x = self._added(x, self.linear(y, f"{h}.output.dense"), f"{h}.output")
        return x

    def words(self, x: Node) -> Node:
        """(..., features) -> (..., vocabulary) logits of the words that stand there; section 3.1, task 1."""
        y = ops.gelu(self.linear(x, "cls.predictions.transform.dense"))
        y = self.layer_norm(y, "cls.predictions.transform.LayerNorm", self.epsilon)
        table = self.weights["embeddings.word_embeddings.weight"]
        return y @ ops.matrix_transpose(table) + self.weights["cls.predictions.bias"]

    def chances(self, x: Node) -> Node:
        """(n, length, features) -> (n, classes) logits, from the first place of each row; section 3.2."""
        return self.linear(self._drop(ops.tanh(self.linear(x[:, 0], "pooler.dense"))), "classifier")

    def _added(self, x: Node, y: Node, name: str) -> Node:
        return self.layer_norm(x + self._drop(y), f"{name}.LayerNorm", self.epsilon)

    def _drop(self, x: Node) -> Node:
        return ops.dropout(x, self.dropout) if self.dropout else x


def load(path: str | os.PathLike[str], *, name: str | None = None, **sizes: Any) -> BERT:
    """The model of a published checkpoint, a safetensors file or its folder; an executor then reads the numbers.

    Sizes follow from the shapes, and from `config.json` beside the file what does not: heads, epsilon. `sizes`, such
    as `classes`, come before both. Heads that the file lacks are drawn; CheckpointError, with a table, if other names
    or shapes are not those of BERT.

    >>> import hetu as ht
    >>> ht.models.bert.load("bert-base-uncased", classes=2)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    CheckpointError: there is no file of weights 'bert-base-uncased'
    """
    found, prefix = PublishedWeights(path), BERT.prefix
    vocabulary, features = found.shape("embeddings.word_embeddings.weight", prefix)
    known = {"heads": "num_attention_heads", "epsilon": "layer_norm_eps"}
    shapes = {
        "positions": found.shape("embeddings.position_embeddings.weight", prefix)[0],
        "kinds": found.shape("embeddings.token_type_embeddings.weight", prefix)[0],
        "hidden": found.shape("encoder.layer.0.intermediate.dense.weight", prefix)[0],
        "classes": found["classifier.weight"][0] if "classifier.weight" in found else None,
    }
    asked = {**shapes, **found.sizes(known, {"epsilon": 1e-12}, sizes)}
    return BERT(vocabulary, features, found.layers(r"\blayer\.(\d+)\."), published=found, name=name, **asked)


_answer_calls(__name__)
