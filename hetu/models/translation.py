"""From one row of symbols to another: an encoder reads, a decoder writes and attends to what was read."""

from __future__ import annotations

from .. import nn, ops
from ..answers import answer_calls as _answer_calls
from ..core.errors import ArgumentError
from ..core.graph import Node
from ..nn.layer import check_sizes
from ..ranges import AtLeast1, Beta, Layers

__all__ = ["EncoderDecoder", "RecurrentEncoderDecoder"]


class EncoderDecoder(nn.Layer):
    """Ids to read (n, s), and ids written so far (n, t), to logits (n, t, targets) of the next ones.

    A. Vaswani et al., "Attention Is All You Need", 2017, section 3.1, with learned positions, of which there are
    `positions`, and norms in front, R. Xiong et al., 2020, fig. 1b. An id 0 that is read is padding.

    >>> import hetu as ht
    >>> source, target = ht.placeholder("source", (None, 9), "int64"), ht.placeholder("target", (None, 7), "int64")
    >>> EncoderDecoder(20, 30, 16, 1, 2)(source, target).shape[1:]
    (7, 30)
    """

    def __init__(
        self,
        sources: AtLeast1,
        targets: AtLeast1,
        features: AtLeast1 = 64,
        layers: Layers = 2,
        heads: AtLeast1 = 4,
        *,
        positions: AtLeast1 = 64,
        dropout: Beta = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        with self.naming():
            self.source, self.target = (nn.Embedding(n, features, name="symbols") for n in (sources, targets))
            self.source_places, self.target_places = (nn.Embedding(positions, features, name="places") for _ in "st")
            self.encoder = [nn.TransformerBlock(features, heads, dropout=dropout) for _ in range(layers)]
            self.encoder_norm = nn.LayerNorm(features)
            self.decoder = [nn.DecoderBlock(features, heads, dropout=dropout) for _ in range(layers)]
            self.decoder_norm = nn.LayerNorm(features)
            self.head = nn.Linear(features, targets)

    def forward(self, source: Node, target: Node) -> Node:
        seen = ops.not_equal(source, 0)[:, None, None, :]
        memory = self.source(source) + self.source_places(ops.arange(source.shape[1]))
        for block in self.encoder:
            memory = block(memory, mask=seen)
        memory = self.encoder_norm(memory)
        h = self.target(target) + self.target_places(ops.arange(target.shape[1]))
        for layer in self.decoder:
            h = layer(h, memory, mask=seen)
        return self.head(self.decoder_norm(h))


class RecurrentEncoderDecoder(nn.Layer):
    """Ids to read (n, s), and ids written so far (n, t), to logits (n, t, targets) of the next ones, by LSTMs.

    M. Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", EMNLP 2015: global attention
    with the score h W m (eq. 8, general), mixed into tanh(W [context; h]) (eq. 5); without input feeding, so that all
    steps are one operator. The encoder reads in both directions, `layers` deep. An id 0 that is read is padding, and
    stands behind all others.

    >>> import hetu as ht
    >>> source, target = ht.placeholder("source", (None, 9), "int64"), ht.placeholder("target", (None, 7), "int64")
    >>> RecurrentEncoderDecoder(20, 30, 16)(source, target).shape[1:]
    (7, 30)
    """

    def __init__(
        self,
        sources: AtLeast1,
        targets: AtLeast1,
        features: AtLeast1 = 64,
        layers: Layers = 1,
        *,
        name: str | None = None,
    ) -> None:
        check_sizes(features=features, layers=layers)
        if features % 2:
            raise ArgumentError(f"features={features} do not divide between two directions", fix="pass an even number")
        super().__init__(name)
        with self.naming():
            self.source, self.target = (nn.Embedding(n, features, name="symbols") for n in (sources, targets))
            self.encoder = [nn.Bidirectional(nn.LSTM, features, features // 2) for _ in range(layers)]
            self.decoder = nn.LSTM(features, features)
            self.score = nn.Linear(features, features, bias=False)
            self.mix = nn.Linear(2 * features, features, bias=False, activation=ops.tanh)
            self.head = nn.Linear(features, targets)

    def forward(self, source: Node, target: Node) -> Node:
        seen = ops.not_equal(source, 0)
        lengths = ops.sum(ops.astype(seen, "int64"), axis=1)
        memory, last = self.source(source), None
        for layer in self.encoder:
            memory, last = layer(memory, lengths=lengths)
        h, _ = self.decoder(self.target(target), last)
        scores = self.score(h) @ ops.matrix_transpose(memory)
        chances = ops.softmax(ops.where(seen[:, None, :], scores, -1e9), axis=-1)
        return self.head(self.mix(ops.concat([chances @ memory, h], axis=2)))


_answer_calls(__name__)
