"""From one row of symbols to another: an encoder reads, a decoder writes and attends to what was read."""

from __future__ import annotations

from .. import nn, ops
from ..answers import answer_names as _answer_names
from ..core.graph import Node

__all__ = ["EncoderDecoder"]
_answer_names(__name__)


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
        sources: int,
        targets: int,
        features: int = 64,
        layers: int = 2,
        heads: int = 4,
        *,
        positions: int = 64,
        dropout: float = 0.0,
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
