"""The models of the CPU benchmark, each written once in words that every library brings (`peer_*.py`).

`f` is a library's vocabulary, `s` the sizes of the row: `f.linear(x, "head", 64, 10)` is a layer whose weights have the
names "head.weight" and "head.bias". All models return what a loss takes: logits or numbers. Images lie as (n, c, h, w)
in the data; from `f.images` or `f.grid` to `f.pooled`, `f.flat` or `f.sequence` each library keeps them as it likes.
Ignored on purpose: dropout, whose random numbers no two libraries share.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple


class Conv(NamedTuple):
    """A convolution of a `cnn` with what follows it: a normalization ("batch", "group"), relu, max-pooling."""

    outputs: int
    size: int
    stride: int = 1
    dilation: int = 1
    groups: int = 1  # 0: as many as there are channels
    padding: int | None = None  # by default images keep their size
    norm: str = ""
    pool: int = 1


def mlp(f: Any, s: Any, x: Any) -> Any:
    """Linear layers with an activation, and maybe a normalization, between them."""
    for i, (inputs, outputs) in enumerate(pairwise(s.sizes)):
        x = f.linear(x, f"layers.{i}", inputs, outputs)
        if i < len(s.sizes) - 2:
            x = getattr(f, s.activation)(f.batch_norm(x, f"norms.{i}", outputs) if s.norm else x)
    return x


def chain(f: Any, s: Any, x: Any) -> Any:
    """Many operators on few numbers: only the overhead per operator counts."""
    for _ in range(s.depth):
        x = f.tanh(x * 0.9 + 0.1)
    return f.linear(x, "head", s.sizes[0], s.sizes[-1])


def cnn(f: Any, s: Any, x: Any) -> Any:
    """Convolutions in a row and a head of linear layers, on all pixels or on their mean."""
    x, channels = f.images(x), s.channels
    for i, c in enumerate(s.convs):
        groups = c.groups or channels
        options = {"stride": c.stride, "dilation": c.dilation, "groups": groups, "padding": c.padding}
        x = f.conv(x, f"convs.{i}", channels, c.outputs, c.size, bias=c.norm != "batch", **options)
        if c.norm == "batch":
            x = f.batch_norm(x, f"norms.{i}", c.outputs)
        elif c.norm == "group":
            x = f.group_norm(x, f"norms.{i}", c.outputs, 8)
        x, channels = f.relu(x), c.outputs
        x = f.max_pool(x, c.pool) if c.pool > 1 else x
    return _stack(f, f.flat(x) if s.flat else f.pooled(x), s.head)


def resnet(f: Any, s: Any, x: Any) -> Any:
    """A stem, and stages of residual blocks; each stage but the first halves the image. K. He et al., CVPR 2016."""
    h, channels = f.relu(_conv_norm(f, f.images(x), "stem", s.channels, s.widths[0], 3)), s.widths[0]
    block = {"basic": _basic, "bottleneck": _bottleneck, "inverted": _inverted}[s.block]
    for stage, width in enumerate(s.widths):
        for number in range(s.depth):
            stride = 2 if stage and not number else 1
            h, channels = block(f, h, f"stages.{stage}.{number}", channels, width, stride, s.groups)
    return _stack(f, f.pooled(h), (channels, 10))


def densenet(f: Any, s: Any, x: Any) -> Any:
    """Convolutions that read what all before them made. G. Huang et al., CVPR 2017."""
    h, channels = f.conv(f.images(x), "stem", s.channels, s.width, 3), s.width
    for i in range(s.depth):
        y = f.relu(f.batch_norm(h, f"norms.{i}", channels))
        h, channels = f.joined(h, f.conv(y, f"convs.{i}", channels, s.growth, 3, bias=False)), channels + s.growth
    return _stack(f, f.pooled(f.relu(f.batch_norm(h, "norm", channels))), (channels, 10))


def unet(f: Any, s: Any, x: Any) -> Any:
    """Down with pooling, up with transposed convolutions, and over at each size. O. Ronneberger et al., 2015."""
    h, channels, kept = f.images(x), s.channels, []
    for i, width in enumerate(s.widths):
        h = f.max_pool(h, 2) if i else h
        h, channels = _twice(f, h, f"down.{i}", channels, width), width
        kept.append(h)
    for i, width in list(enumerate(s.widths[:-1]))[::-1]:
        h = f.conv_transpose(h, f"up.{i}", channels, width, 2, 2)
        h, channels = _twice(f, f.joined(kept[i], h), f"joined.{i}", 2 * width, width), width
    return f.flat(f.conv(h, "head", channels, 1, 1))


def generator(f: Any, s: Any, x: Any) -> Any:
    """Images from noise by transposed convolutions that double the size. A. Radford et al., ICLR 2016."""
    h = f.grid(f.linear(x, "first", s.sizes[0], s.widths[0] * 16), s.widths[0], 4)
    for i, (inputs, outputs) in enumerate(pairwise(s.widths)):
        h = f.conv_transpose(f.relu(f.batch_norm(h, f"norms.{i}", inputs)), f"up.{i}", inputs, outputs, 4, 2, 1)
    return f.flat(f.tanh(h))


def gpt(f: Any, s: Any, x: Any) -> Any:
    """Blocks that normalize first, causal attention, tanh-gelu, logits of the next token. A. Radford et al., 2019."""
    h = f.embedding(x, "tokens", s.vocabulary, s.d) + f.weight("positions", s.length, s.d)
    for i in range(s.depth):
        name = f"blocks.{i}"
        h = h + _attention(f, s, f.layer_norm(h, f"{name}.norm1", s.d), name, causal=True)
        up = f.linear(f.layer_norm(h, f"{name}.norm2", s.d), f"{name}.up", s.d, 4 * s.d)
        h = h + f.linear(f.tanh_gelu(up), f"{name}.down", 4 * s.d, s.d)
    return f.linear(f.layer_norm(h, "norm", s.d), "head", s.d, s.vocabulary, bias=False)


def bert(f: Any, s: Any, x: Any, mask: Any = None) -> Any:
    """Blocks that normalize last, exact gelu; the first token is classified. `mask` (n, tokens) is true where text is.

    J. Devlin et al., NAACL 2019.
    """
    h = f.embedding(x, "tokens", s.vocabulary, s.d) + f.weight("positions", s.length, s.d)
    h = _encoder(f, s, f.layer_norm(h, "norm", s.d), mask)
    return f.linear(f.first(h), "head", s.d, s.classes)


def vit(f: Any, s: Any, x: Any) -> Any:
    """An encoder of the patches of an image. A. Dosovitskiy et al., ICLR 2021."""
    patches = f.conv(f.images(x), "patches", s.channels, s.d, s.patch, stride=s.patch, padding=0)
    h = f.sequence(patches) + f.weight("positions", (s.side // s.patch) ** 2, s.d)
    return f.linear(f.mean(_encoder(f, s, h), 1), "head", s.d, s.classes)


def wide_rows(f: Any, s: Any, x: Any) -> Any:
    """Norms and softmaxes over long rows, and nothing else."""
    for i in range(s.depth):
        x = x + f.softmax(f.layer_norm(x, f"norms.{i}", s.sizes[0]))
    return x


def recurrent(f: Any, s: Any, x: Any) -> Any:
    """Layers of LSTM or GRU over features or tokens; the last state is classified, or every step if `s.every`."""
    h, inputs = (f.embedding(x, "tokens", s.vocabulary, s.inputs) if s.vocabulary else x), s.inputs
    for i in range(s.depth):
        h, last = getattr(f, s.cell)(h, f"layers.{i}", inputs, s.hidden, both=s.both)
        inputs = s.hidden * (2 if s.both else 1)
    return f.linear(h if s.every else last, "head", inputs, s.classes)


def wide_deep(f: Any, s: Any, ids: Any, x: Any) -> Any:
    """An MLP over embedded fields and numbers, plus a linear term of the numbers. H.-T. Cheng et al., 2016."""
    embedded = f.flat(f.embedding(ids, "table", s.rows, s.d))
    deep = _stack(f, f.concat(embedded, x), (s.fields * s.d + s.numbers, *s.sizes, 1))
    return deep + f.linear(x, "wide", s.numbers, 1)


def deepfm(f: Any, s: Any, ids: Any) -> Any:
    """Terms of one field, products of two, and an MLP over all. H. Guo et al., IJCAI 2017."""
    embedded, single = f.embedding(ids, "table", s.rows, s.d), f.bag(ids, "single", s.rows, 1)
    total = f.sum(embedded, 1)
    pairs = f.sum(total * total - f.sum(embedded * embedded, 1), 1, keepdims=True) * 0.5
    return single + pairs + _stack(f, f.flat(embedded), (s.fields * s.d, *s.sizes, 1))


def bags(f: Any, s: Any, ids: Any) -> Any:
    """The sum of the rows of each bag, classified."""
    return _stack(f, f.bag(ids, "table", s.rows, s.d), (s.d, *s.sizes, s.classes))


def gcn(f: Any, s: Any, x: Any, **matrix: Any) -> Any:
    """Two graph convolutions over all nodes of one graph. T. Kipf and M. Welling, ICLR 2017."""
    first, hidden, last = s.sizes
    h = f.relu(f.spread(f.linear(x, "layers.0", first, hidden, bias=False), **matrix) + f.weight("bias.0", hidden))
    return f.spread(f.linear(h, "layers.1", hidden, last, bias=False), **matrix) + f.weight("bias.1", last)


def _stack(f: Any, x: Any, sizes: tuple[int, ...]) -> Any:
    """Linear layers with relu between them."""
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        x = f.linear(f.relu(x) if i else x, f"head.{i}", inputs, outputs)
    return x


def _conv_norm(f: Any, x: Any, name: str, inputs: int, outputs: int, size: int, **options: int) -> Any:
    return f.batch_norm(
        f.conv(x, f"{name}.conv", inputs, outputs, size, bias=False, **options), f"{name}.norm", outputs
    )


def _twice(f: Any, x: Any, name: str, inputs: int, outputs: int) -> Any:
    h = f.relu(_conv_norm(f, x, f"{name}.0", inputs, outputs, 3))
    return f.relu(_conv_norm(f, h, f"{name}.1", outputs, outputs, 3))


def _basic(f: Any, h: Any, name: str, inputs: int, width: int, stride: int, groups: int) -> tuple[Any, int]:
    y = f.relu(_conv_norm(f, h, f"{name}.0", inputs, width, 3, stride=stride))
    y = _conv_norm(f, y, f"{name}.1", width, width, 3, groups=groups)
    return f.relu(y + _shortcut(f, h, name, inputs, width, stride)), width


def _bottleneck(f: Any, h: Any, name: str, inputs: int, width: int, stride: int, groups: int) -> tuple[Any, int]:
    y = f.relu(_conv_norm(f, h, f"{name}.0", inputs, width, 1))
    y = f.relu(_conv_norm(f, y, f"{name}.1", width, width, 3, stride=stride, groups=groups))
    y = _conv_norm(f, y, f"{name}.2", width, 4 * width, 1)
    return f.relu(y + _shortcut(f, h, name, inputs, 4 * width, stride)), 4 * width


def _inverted(f: Any, h: Any, name: str, inputs: int, width: int, stride: int, groups: int) -> tuple[Any, int]:
    """Wide inside, with one kernel per channel. M. Sandler et al., CVPR 2018."""
    inside = groups * inputs
    y = f.relu(_conv_norm(f, h, f"{name}.0", inputs, inside, 1))
    y = f.relu(_conv_norm(f, y, f"{name}.1", inside, inside, 3, stride=stride, groups=inside))
    y = _conv_norm(f, y, f"{name}.2", inside, width, 1)
    return (h + y if (inputs, stride) == (width, 1) else y), width


def _shortcut(f: Any, h: Any, name: str, inputs: int, outputs: int, stride: int) -> Any:
    same = inputs == outputs and stride == 1
    return h if same else _conv_norm(f, h, f"{name}.shortcut", inputs, outputs, 1, stride=stride)


def _encoder(f: Any, s: Any, h: Any, mask: Any = None) -> Any:
    for i in range(s.depth):
        name = f"blocks.{i}"
        h = f.layer_norm(h + _attention(f, s, h, name, mask=mask), f"{name}.norm1", s.d)
        up = f.gelu(f.linear(h, f"{name}.up", s.d, 4 * s.d))
        h = f.layer_norm(h + f.linear(up, f"{name}.down", 4 * s.d, s.d), f"{name}.norm2", s.d)
    return h


def _attention(f: Any, s: Any, h: Any, name: str, causal: bool = False, mask: Any = None) -> Any:
    """Self-attention with one product for queries, keys and values; heads of 64."""
    attended = f.attention(f.linear(h, f"{name}.qkv", s.d, 3 * s.d), s.d // 64, causal=causal, mask=mask)
    return f.linear(attended, f"{name}.proj", s.d, s.d)
