"""Each model at a small size: what it is fed, its output, and the formula of that by its variables in their order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import hetu as ht
from hetu.models import bert, clicks, experts, gpt2, graphs, knowledge, llama, text, translation, vision, vit
from hetu.models import wide as wides

from . import formulas as f

RNG = np.random.default_rng(0)
BATCH, CLASSES, NODES, VOCABULARY = 12, 5, 9, 11
IMAGES = RNG.standard_normal((BATCH, 2, 12, 12)).astype("float32")
WORDS = RNG.integers(0, VOCABULARY, (BATCH, 6))
NUMBERS, IDS = RNG.standard_normal((BATCH, 3)).astype("float32"), RNG.integers(0, 20, (BATCH, 4))
FEATURES = RNG.standard_normal((NODES, 7)).astype("float32")
EDGES = np.array([(i, j) for i in range(NODES - 1) for j in range(i) if (3 * i + j) % 4 == 0])  # none at the last
PICKED = RNG.integers(0, NODES, BATCH)


class Model(NamedTuple):
    """`build(**placeholders)` makes the output of what is fed; `formula(weights, **arrays)` says what it has to be.

    Data parallelism suits all, `also` names what else does: layers to split, or to make stages of. Ranks have the
    losses of one process for so many `steps`, within `atol`.
    """

    build: Callable[..., ht.Node]
    formula: Callable[..., np.ndarray]
    fed: dict[str, np.ndarray]
    targets: np.ndarray  # integers: classes; floats: of a binary cross entropy
    also: tuple[str, ...] = ()
    steps: int = 4
    atol: float = 1e-5


def mlp(w: f.Weights, x: np.ndarray) -> np.ndarray:
    x = f.relu(f.linear(x.reshape(len(x), -1), w))
    return f.linear(f.relu(f.linear(x, w)), w)


def lenet(w: f.Weights, x: np.ndarray) -> np.ndarray:
    x = f.max_pool(f.relu(f.conv(x, w, padding=2)))
    x = f.max_pool(f.relu(f.conv(x, w)))
    x = f.relu(f.linear(x.reshape(len(x), -1), w))
    return f.linear(f.relu(f.linear(x, w)), w)


def conv_norm(w: f.Weights, x: np.ndarray, kernel: int = 3, stride: int = 1) -> np.ndarray:
    return f.batch_norm(f.conv(x, w, padding=kernel // 2, stride=stride, bias=False), w)


def head(w: f.Weights, x: np.ndarray) -> np.ndarray:
    return f.linear(x.mean(axis=(2, 3)), w)


def vgg(w: f.Weights, x: np.ndarray) -> np.ndarray:
    for count in (1, 2):
        for _ in range(count):
            x = f.relu(conv_norm(w, x))
        x = f.max_pool(x)
    return head(w, x)


def residual(*blocks: int, stem: int) -> Callable[..., np.ndarray]:
    def formula(w: f.Weights, x: np.ndarray) -> np.ndarray:
        x = f.relu(conv_norm(w, x, stride=stem))
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage and not block else 1
                y = conv_norm(w, f.relu(conv_norm(w, x, stride=stride)))
                x = f.relu(y + (x if stride == 1 else conv_norm(w, x, 1, stride)))
        return head(w, x)

    return formula


def bottlenecks(w: f.Weights, x: np.ndarray) -> np.ndarray:
    x = f.relu(conv_norm(w, x))
    for stage, count in enumerate((3, 4, 6, 3)):
        for block in range(count):
            stride = 2 if stage and not block else 1
            y = f.relu(conv_norm(w, f.relu(conv_norm(w, x, 1)), stride=stride))
            y = conv_norm(w, y, 1)
            x = f.relu(y + (x if block else conv_norm(w, x, 1, stride)))
    return head(w, x)


def mobilenet(w: f.Weights, x: np.ndarray) -> np.ndarray:
    def relu6(x: np.ndarray) -> np.ndarray:
        return np.clip(x, 0, 6)

    x = relu6(conv_norm(w, x))
    for expansion, count, first in ((1, 1, 1), (2, 2, 2)):
        for block in range(count):
            y = relu6(conv_norm(w, x, 1)) if expansion > 1 else x
            y = conv_norm(w, relu6(conv_norm(w, y, stride=1 if block else first)), 1)
            x = x + y if block else y
    return head(w, relu6(conv_norm(w, x, 1)))


def densenet(w: f.Weights, x: np.ndarray) -> np.ndarray:
    def norm_relu(x: np.ndarray) -> np.ndarray:
        return f.relu(f.batch_norm(x, w))

    def conv(x: np.ndarray, kernel: int) -> np.ndarray:
        return f.conv(x, w, padding=kernel // 2, bias=False)

    x = conv(x, 3)
    for block in range(2):
        for _ in range(2):
            x = np.concatenate([x, conv(norm_relu(conv(norm_relu(x), 1)), 3)], axis=1)
        if not block:
            x = conv(norm_relu(x), 1)
            n, c, height, width = x.shape
            x = x.reshape(n, c, height // 2, 2, width // 2, 2).mean(axis=(3, 5))
    return head(w, norm_relu(x))


def unet(w: f.Weights, x: np.ndarray) -> np.ndarray:
    def twice(x: np.ndarray) -> np.ndarray:
        return f.relu(conv_norm(w, f.relu(conv_norm(w, x))))

    first = twice(x)
    second = twice(f.max_pool(first))
    x = f.up(twice(f.max_pool(second)), w)
    x = f.up(twice(np.concatenate([second, x], axis=1)), w)
    return f.conv(twice(np.concatenate([first, x], axis=1)), w)


def vit_(w: f.Weights, x: np.ndarray) -> np.ndarray:
    """Patches of 4 x 4 of images of 12 x 12."""
    kernel, bias = next(w), next(w)
    patches = x.reshape(BATCH, 2, 3, 4, 3, 4).transpose(0, 2, 4, 1, 3, 5).reshape(BATCH, 9, -1)
    words = patches @ kernel.reshape(len(kernel), -1).T + bias
    x = np.concatenate([np.zeros((BATCH, 1, 8)), words], axis=1) + next(w)
    for _ in range(2):
        x = f.block(x, w, heads=2, seen=np.ones((10, 10), bool))
    weight, bias = next(w), next(w)  # are made before the norm that they follow
    return f.layer_norm(x[:, 0], w) @ weight + bias


def gpt(w: f.Weights, x: np.ndarray) -> np.ndarray:
    x = next(w)[x] + next(w)
    for _ in range(2):
        x = f.block(x, w, heads=2)
    last = next(w)  # is made before the norm that it follows
    return f.layer_norm(x, w) @ last


def gpt2_(w: f.Weights, x: np.ndarray) -> np.ndarray:
    table = next(w)
    x = table[x] + next(w)[: x.shape[1]]
    for _ in range(2):
        x = x + f.attention(f.layer_norm(x, w), w, heads=2)
        x = x + f.linear(f.gelu_tanh(f.linear(f.layer_norm(x, w), w)), w)
    return f.layer_norm(x, w) @ table.T


def llama_(w: f.Weights, x: np.ndarray) -> np.ndarray:
    """Four heads of queries of 4 features, which two of keys serve."""
    angles = np.arange(x.shape[1])[:, None] * 10000.0 ** -np.array([0.0, 0.5])

    def rotated(y: np.ndarray) -> np.ndarray:
        pairs = (y[..., :2] + 1j * y[..., 2:]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    def norm(y: np.ndarray) -> np.ndarray:
        return y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + 1e-6) * next(w)

    x = next(w)[x]
    for _ in range(2):
        y = norm(x)
        q, k, v = rotated(f.heads_of(y @ next(w), 4)), rotated(f.heads_of(y @ next(w), 2)), f.heads_of(y @ next(w), 2)
        x = x + f.mixed(q, k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]]) @ next(w)
        y = norm(x)
        gate = y @ next(w)
        x = x + (gate * f.sigmoid(gate) * (y @ next(w))) @ next(w)
    return norm(x) @ next(w)


BERT_SEEN = np.arange(6) < RNG.integers(2, 7, BATCH)[:, None]


def bert_(w: f.Weights, x: np.ndarray, seen: np.ndarray) -> np.ndarray:
    table = next(w)
    x = f.layer_norm(table[x] + next(w)[: x.shape[1]] + next(w)[0], w, 1e-12)
    for _ in range(2):
        q, k, v = (f.heads_of(f.linear(x, w), 2) for _ in range(3))
        x = f.layer_norm(x + f.linear(f.mixed(q, k, v, seen[:, None, None, :]), w), w, 1e-12)
        x = f.layer_norm(x + f.linear(f.gelu(f.linear(x, w)), w), w, 1e-12)
    return f.layer_norm(f.gelu(f.linear(x, w)), w, 1e-12) @ table.T + next(w)


def bert_words(x: ht.Node, seen: ht.Node) -> ht.Node:
    model = bert.BERT(VOCABULARY, 8, 2, 2, positions=9)
    return model.words(model(x, mask=seen))


READ = np.where(BERT_SEEN, np.maximum(WORDS, 1), 0)


def translation_(w: f.Weights, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """One layer each way; weights are made layer by layer, and in a layer of the decoder both attentions first."""
    seen = (source != 0)[:, None, None, :]
    tables = [next(w) for _ in range(4)]
    memory = tables[0][source] + tables[2][: source.shape[1]]
    memory = f.layer_norm(f.block(memory, w, 2, seen), w)
    itself, across = [next(w) for _ in range(8)], [next(w) for _ in range(8)]
    norms = [[next(w), next(w)] for _ in range(3)]
    up, down = [next(w), next(w)], [next(w), next(w)]
    h = tables[1][target] + tables[3][: target.shape[1]]
    h = h + f.attention(f.layer_norm(h, iter(norms[0])), iter(itself), 2)
    q, k, v, out = (across[n : n + 2] for n in (0, 2, 4, 6))
    asked = f.heads_of(f.linear(f.layer_norm(h, iter(norms[1])), iter(q)), 2)
    k, v = (f.heads_of(f.linear(memory, iter(part)), 2) for part in (k, v))
    h = h + f.linear(f.mixed(asked, k, v, seen), iter(out))
    h = h + f.linear(f.gelu(f.linear(f.layer_norm(h, iter(norms[2])), iter(up))), iter(down))
    return f.linear(f.layer_norm(h, w), w)


def translated(source: ht.Node, target: ht.Node) -> ht.Node:
    return translation.EncoderDecoder(VOCABULARY, VOCABULARY, 8, 1, 2, positions=9)(source, target)


def recurrent_translation(w: f.Weights, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Each row alone, without its padding; one layer reads in both directions."""
    read, written, *layers = w
    score, mix = layers[6:8]
    made = []
    for ids, begun in zip(source, target):
        x = read[ids[None, ids != 0]]
        ahead, back = f.lstm_states(x, iter(layers[:2])), f.lstm_states(x[:, ::-1], iter(layers[2:4]))
        memory = np.concatenate([ahead[0], back[0][:, ::-1]], axis=2)
        first = tuple(np.concatenate(pair, axis=1) for pair in zip(ahead[1:], back[1:]))
        h = f.lstm_states(written[begun[None]], iter(layers[4:6]), first)[0]
        context = f.softmax(h @ score @ memory.swapaxes(1, 2)) @ memory
        made.append(f.linear(np.tanh(np.concatenate([context, h], axis=2) @ mix), iter(layers[8:])))
    return np.concatenate(made)


def recurrent_translated(source: ht.Node, target: ht.Node) -> ht.Node:
    return translation.RecurrentEncoderDecoder(VOCABULARY, VOCABULARY, 8)(source, target)


def of_experts(w: f.Weights, x: np.ndarray) -> np.ndarray:
    """Each token by itself through the expert of its greatest probability."""
    x = next(w)[x] + next(w)
    for _ in range(2):
        projections = [next(w) for _ in range(8)]
        scaled = f.layer_norm(x, w)
        x = x + f.attention(scaled, iter(projections), heads=2)
        gate = next(w)
        up, up_bias, down, down_bias = (next(w) for _ in range(4))
        tokens = f.layer_norm(x, w).reshape(-1, 8)
        chances = f.softmax(tokens @ gate)
        made = np.zeros_like(tokens)
        for n, (token, chance) in enumerate(zip(tokens, chances)):
            e = chance.argmax()
            made[n] = chance[e] * ((f.gelu(token @ up[e] + up_bias[e]) @ down[e] + down_bias[e])[0])
        x = x + made.reshape(x.shape)
    last = next(w)
    return f.layer_norm(x, w) @ last


def recurrent(w: f.Weights, x: np.ndarray) -> np.ndarray:
    return f.linear(f.lstm(next(w)[x], w), w)


def wide(w: f.Weights, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return f.linear(x, w)[:, 0] + next(w)[ids].sum(axis=(1, 2))


def deep(w: f.Weights, x: np.ndarray) -> np.ndarray:
    return f.linear(f.relu(f.linear(f.relu(f.linear(x, w)), w)), w)[:, 0]


def joined(x: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return np.concatenate([x, vectors.reshape(len(x), -1)], axis=1)


def wide_deep(w: f.Weights, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return wide(w, x, ids) + deep(w, joined(x, next(w)[ids]))


def deepfm(w: f.Weights, x: np.ndarray, ids: np.ndarray, bag: np.ndarray) -> np.ndarray:
    vectors, of_bag = next(w)[ids], next(w)
    means = [of_bag[row[row > 0]].mean(axis=0) if row.any() else 0 * of_bag[0] for row in bag]
    vectors = np.concatenate([vectors, np.stack(means)[:, None]], axis=1)
    pairs = sum((vectors[:, i] * vectors[:, j]).sum(axis=1) for i in range(5) for j in range(i))
    return wide(w, x, ids) + pairs + deep(w, joined(x, vectors))


def dcn(w: f.Weights, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    first = crossed = joined(x, next(w)[ids])
    for _ in range(3):
        crossed = first * f.linear(crossed, w) + crossed
    return f.linear(crossed, w)[:, 0] + deep(w, first)


def dcn_v1(w: f.Weights, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    first = crossed = joined(x, next(w)[ids])
    for _ in range(3):
        crossed = first * (crossed @ next(w)) + next(w) + crossed
    return f.linear(crossed, w)[:, 0] + deep(w, first)


def xdeepfm(w: f.Weights, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Map h of a layer is the sum over i and j of W[h, i, j] times the product of map i and field j."""
    vectors = made = next(w)[ids]
    pooled = []
    for size in (3, 2):
        weight = next(w).reshape(made.shape[1], vectors.shape[1], size)
        made = np.einsum("ijh,nid,njd->nhd", weight, made, vectors)
        pooled.append(made.sum(axis=2))
    crossed = f.linear(np.concatenate(pooled, axis=1), w)[:, 0]
    return wide(w, x, ids) + crossed + deep(w, joined(x, vectors))


def dlrm(w: f.Weights, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    vectors = next(w)[ids]
    bottom = f.relu(f.linear(f.relu(f.linear(x, w)), w))
    every = [bottom, *np.moveaxis(vectors, 1, 0)]
    pairs = [(a * b).sum(axis=1) for a, b in itertools.combinations(every, 2)]
    return deep(w, np.concatenate([bottom, np.stack(pairs, axis=1)], axis=1))


def ncf(w: f.Weights, user: np.ndarray, item: np.ndarray) -> np.ndarray:
    product = next(w)[user] * next(w)[item]
    beside = np.concatenate([next(w)[user], next(w)[item]], axis=1)
    return f.linear(product, w)[:, 0] + deep(w, beside)


def towers(w: f.Weights, user: np.ndarray, item: np.ndarray) -> np.ndarray:
    def tower(ids: np.ndarray) -> np.ndarray:
        y = f.linear(f.relu(f.linear(next(w)[ids], w)), w)
        return y / np.sqrt((y * y).sum(axis=1, keepdims=True))

    asks, answers = tower(user), tower(item)
    return asks @ answers.T / 0.1


def gcn(w: f.Weights, picked: np.ndarray) -> np.ndarray:
    a = f.dense(EDGES, NODES, own=True)
    a = a / np.sqrt(np.outer(a.sum(axis=1), a.sum(axis=1)))
    h = f.relu(a @ FEATURES @ next(w) + next(w))
    return (a @ h @ next(w) + next(w))[picked]


def graphsage(w: f.Weights, picked: np.ndarray) -> np.ndarray:
    a = f.dense(EDGES, NODES, own=False)
    a = a / np.maximum(a.sum(axis=1, keepdims=True), 1)
    h = f.relu(f.linear(FEATURES, w) + a @ FEATURES @ next(w))
    return (f.linear(h, w) + a @ h @ next(w))[picked]


def gat(w: f.Weights, picked: np.ndarray) -> np.ndarray:
    seen = f.dense(EDGES, NODES, own=True)
    h = attended(w, FEATURES, np.arange(NODES), seen, 2)
    return attended(w, np.where(h > 0, h, np.expm1(h)), np.arange(NODES), seen, 1)[picked]


def attended(w: f.Weights, x: np.ndarray, own: np.ndarray, seen: np.ndarray, heads: int) -> np.ndarray:
    """A layer of graph attention: each node of `own` sees those of x of which its row of `seen` is not 0."""
    weight, asks, answers, bias = (next(w) for _ in range(4))
    h = (x @ weight).reshape(len(x), heads, -1)
    made = []
    for k in range(heads):
        scores = (h[own, k] @ asks[k])[:, None] + (h[:, k] @ answers[k])[None, :]
        scores = np.where(scores > 0, scores, 0.2 * scores)
        made.append(f.softmax(np.where(seen > 0, scores, -np.inf)) @ h[:, k])
    return np.concatenate(made, axis=1) + bias


def batch(itself: bool) -> dict[str, np.ndarray]:
    """What a batch with sampled neighbors feeds."""
    sizes = {"fanouts": (2, 3), "batch_size": 4}
    loader = ht.data.NeighborLoader(EDGES, NODES, [5, 8, 0, 6], [0] * 4, itself=itself, **sizes)
    return dict(zip((node.name for node in loader.placeholders().inputs[:-1]), next(iter(loader))))


def sampled(model: ht.nn.Layer, nodes: ht.Node, **given: ht.Node) -> ht.Node:
    hops = tuple((given[f"own_{k}"], tuple(given[f"{name}_{k}"] for name in ENTRIES)) for k in range(2))
    return model(ht.take(ht.constant(FEATURES), nodes), hops)


ENTRIES = ("rows", "columns", "values")


def hops_of(given: dict[str, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of each hop the nodes that gather, and the matrix by which they do."""
    for k in range(2):
        own, rows, columns, values = (given[f"{name}_{k}"] for name in ("own", *ENTRIES))
        a = np.zeros((len(own), len(given["own_0"]) if k else len(given["nodes"])))
        a[rows, columns] = values
        yield own, a


def of_sampled(w: f.Weights, **given: np.ndarray) -> np.ndarray:
    x = FEATURES[given["nodes"]]
    for k, (own, a) in enumerate(hops_of(given)):
        x = f.linear(x[own], w) + a @ x @ next(w)
        x = x if k else f.relu(x)
    return x


def of_sampled_attention(w: f.Weights, **given: np.ndarray) -> np.ndarray:
    (own, a), (last, b) = hops_of(given)
    h = attended(w, FEATURES[given["nodes"]], own, a, 2)
    return attended(w, np.where(h > 0, h, np.expm1(h)), last, b, 1)


def images(build: Callable[..., ht.Node], formula: Callable[..., np.ndarray], *also: str) -> Model:
    return Model(lambda x: build(x, CLASSES), formula, {"x": IMAGES}, RNG.integers(0, CLASSES, BATCH), also)


def words(build: Callable[[ht.Node], ht.Node], formula: Callable[..., np.ndarray], *also: str) -> Model:
    return Model(build, formula, {"x": WORDS}, RNG.integers(0, VOCABULARY, WORDS.shape), also)


def mixed(x: ht.Node) -> ht.Node:
    sizes = {"features": 8, "hidden": 5, "heads": 2, "experts": 3}
    return experts.gpt_of_experts(x, VOCABULARY, lambda: ht.nn.TopKGate(8, 3), capacity=None, **sizes)[0]


def click(build: Callable[..., ht.Node], formula: Callable[..., np.ndarray]) -> Model:
    fed = {"x": NUMBERS, "ids": IDS}
    targets = RNG.integers(0, 2, BATCH).astype("float32")
    return Model(lambda x, ids: build(x, ids, 20), formula, fed, targets, ("pipeline",))


def bagged(build: Callable[..., ht.Node], formula: Callable[..., np.ndarray]) -> Model:
    """With a field of up to 3 values of 6, which some rows lack."""
    plain = click(build, formula)
    bag = np.sort(RNG.integers(1, 6, (BATCH, 3)) * (np.arange(3) < RNG.integers(0, 4, (BATCH, 1))))[:, ::-1]
    return plain._replace(
        build=lambda x, ids, bag: build(x, ids, 20, bags=[(bag, 6)]), fed={**plain.fed, "bag": bag.copy()}
    )


OWN = np.random.default_rng(1)
OF_BAGS = np.array([0, 4, 4, *range(6, 15)]), OWN.integers(0, 20, 18), OWN.standard_normal(18), OWN.integers(0, 3, 18)


def bags(build: Callable[..., ht.Node], terms: Callable[..., np.ndarray], **sizes: int) -> Model:
    """12 bags of 18 entries, one of which is empty and one has 4; `terms(w, rows, fields)` are those of one bag."""
    starts, ids, weights, fields = OF_BAGS
    fed = {"ids": ids, "weights": weights.astype("float32"), "starts": starts}
    fed |= {"fields": fields} if sizes else {}

    def made(ids: ht.Node, weights: ht.Node, starts: ht.Node, **more: ht.Node) -> ht.Node:
        return build(ids, *more.values(), starts, 20, weights, **sizes)

    def formula(w: f.Weights, **_: np.ndarray) -> np.ndarray:
        known = [*w]
        of_vectors = known.pop(0) if len(known) > 2 else None
        weight, bias, *rest = known
        ends = [*starts[1:], len(ids)]
        linear = np.array([(weights[a:b] * weight[ids[a:b]]).sum() + bias for a, b in zip(starts, ends)])
        if of_vectors is None:
            return linear
        rows = [(of_vectors[ids[a:b]] * weights[a:b, None], fields[a:b]) for a, b in zip(starts, ends)]
        return linear + terms(iter(rest), rows)

    return Model(made, formula, fed, OWN.integers(0, 2, BATCH).astype("float32"))


def pairs(w: f.Weights, rows: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    return np.array([sum(a @ b for a, b in itertools.combinations(own, 2)) for own, _ in rows], dtype=float)


def field_pairs(w: f.Weights, rows: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    split = [(own.reshape(-1, 3, 4), of) for own, of in rows]
    both = [[(a[g], b[h]) for (a, h), (b, g) in itertools.combinations(zip(*one), 2)] for one in split]
    return np.array([sum(a @ b for a, b in one) for one in both], dtype=float)


def field_deep(w: f.Weights, rows: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    summed = [np.concatenate([own[of == k].sum(axis=0) for k in range(3)]) for own, of in rows]
    return pairs(w, rows) + deep(w, np.stack(summed))


def taken(build: Callable[..., ht.Node], formula: Callable[..., np.ndarray], targets: np.ndarray, *also: str) -> Model:
    fed = {"user": IDS[:, 0], "item": IDS[:, 1]}
    return Model(lambda user, item: build(user, item, 20, 20), formula, fed, targets, also)


def nodes(build: Callable[..., ht.Node], formula: Callable[..., np.ndarray], kind: Any, **sizes: int) -> Model:
    """Dropout is left out, as what it drops of a constant is drawn alike in the parts of a batch."""

    def made(picked: ht.Node) -> ht.Node:
        graph = ht.data.adjacency(EDGES, NODES, kind)
        return ht.take(build(ht.constant(FEATURES), graph, CLASSES, dropout=0.0, **sizes), picked)

    return Model(made, formula, {"picked": PICKED}, RNG.integers(0, CLASSES, BATCH))


def triples(score: Callable[..., ht.Node], formula: Callable[..., np.ndarray], margin: float = 0.0) -> Model:
    def made(head: ht.Node, relation: ht.Node, tail: ht.Node) -> ht.Node:
        return knowledge.Triples(20, 4, 6, score, margin=margin)(head, relation, tail)

    def wanted(w: f.Weights, head: np.ndarray, relation: np.ndarray, tail: np.ndarray) -> np.ndarray:
        entities, relations = next(w), next(w)
        return margin + formula(entities[head], relations[relation], entities[tail])

    fed = {"head": IDS[:, 0], "relation": IDS[:, 1] % 4, "tail": IDS[:, 2]}
    return Model(made, wanted, fed, RNG.integers(0, 2, BATCH).astype("float32"))


def complexes(x: np.ndarray) -> np.ndarray:
    return x[:, :3] + 1j * x[:, 3:]


def turned(h: np.ndarray, r: np.ndarray, t: np.ndarray) -> np.ndarray:
    return -np.abs(complexes(h) * np.exp(1j * r[:, :3]) - complexes(t)).sum(axis=1)


def agreement(h: np.ndarray, r: np.ndarray, t: np.ndarray) -> np.ndarray:
    return (complexes(h) * complexes(r) * complexes(t).conj()).sum(axis=1).real


MODELS = {
    "vision.logistic": images(vision.logistic, lambda w, x: f.linear(x.reshape(BATCH, -1), w)),
    "vision.mlp": images(vision.mlp, mlp, "pipeline"),
    "vision.lenet": images(vision.lenet, lenet, "pipeline"),
    "vision.vgg": images(partial(vision.vgg, width=4, stages=(1, 2)), vgg),
    "vision.resnet": images(vision.resnet, residual(1, 1, 1, stem=2)),
    "vision.resnet18": images(partial(vision.resnet18, width=2), residual(2, 2, 2, 2, stem=1)),
    "vision.resnet34": images(partial(vision.resnet34, width=2), residual(3, 4, 6, 3, stem=1)),
    # Inputs times 1 + 2e-7 change its third loss by 0.1.
    "vision.resnet50": images(partial(vision.resnet50, width=2), bottlenecks)._replace(steps=2, atol=1e-3),
    "vision.mobilenet": images(partial(vision.mobilenet, stages=((1, 8, 1, 1), (2, 12, 2, 2))), mobilenet),
    "vision.densenet": images(partial(vision.densenet, growth=4, blocks=(2, 2)), densenet),
    "vision.unet": Model(
        lambda x: vision.unet(x, CLASSES, width=4),
        unet,
        {"x": IMAGES},
        RNG.integers(0, 2, (BATCH, CLASSES, 12, 12)).astype("float32"),
    ),
    "vit.vit": images(partial(vit.vit, features=8, layers=2, heads=2), vit_, "tensor"),
    "text.gpt": words(lambda x: text.gpt(x, VOCABULARY, features=8, layers=2, heads=2), gpt, "tensor", "pipeline"),
    "gpt2.GPT2": words(lambda x: gpt2.GPT2(VOCABULARY, 8, 2, 2, positions=9)(x), gpt2_, "pipeline", "tensor"),
    "llama.Llama": words(lambda x: llama.Llama(VOCABULARY, 16, 2, 4, key_heads=2)(x), llama_, "pipeline", "tensor"),
    "bert.BERT": Model(bert_words, bert_, {"x": WORDS, "seen": BERT_SEEN}, WORDS, ("tensor",)),
    "translation.EncoderDecoder": Model(
        translated, translation_, {"source": READ, "target": WORDS[:, :5]}, WORDS[:, 1:]
    ),
    "translation.RecurrentEncoderDecoder": Model(
        recurrent_translated, recurrent_translation, {"source": READ, "target": WORDS[:, :5]}, WORDS[:, 1:]
    ),
    "experts.gpt_of_experts": words(mixed, of_experts),
    "text.RecurrentText": words(lambda x: text.RecurrentText(VOCABULARY, 6, features=4)(x)[0], recurrent, "pipeline"),
    "clicks.wide_deep": click(clicks.wide_deep, wide_deep),
    "clicks.deepfm": bagged(clicks.deepfm, deepfm),
    "clicks.dcn": click(clicks.dcn, dcn),
    "clicks.dcn_v1": click(clicks.dcn_v1, dcn_v1),
    "clicks.xdeepfm": click(partial(clicks.xdeepfm, maps=(3, 2)), xdeepfm),
    "clicks.dlrm": click(clicks.dlrm, dlrm),
    "wide.logistic": bags(wides.logistic, pairs),
    "wide.factorization": bags(wides.factorization, pairs),
    "wide.field_factorization": bags(wides.field_factorization, field_pairs, field_count=3),
    "wide.deep_factorization": bags(wides.deep_factorization, field_deep, field_count=3),
    "clicks.ncf": taken(clicks.ncf, ncf, RNG.integers(0, 2, BATCH).astype("float32"), "pipeline"),
    "clicks.two_towers": taken(clicks.two_towers, towers, np.arange(BATCH)),
    "knowledge.transe": triples(knowledge.transe, lambda h, r, t: -np.abs(h + r - t).sum(axis=1)),
    "knowledge.distmult": triples(knowledge.distmult, lambda h, r, t: (h * r * t).sum(axis=1)),
    "knowledge.complex_": triples(knowledge.complex_, agreement),
    "knowledge.rotate": triples(knowledge.rotate, turned),
    "knowledge.Triples": triples(knowledge.transe, lambda h, r, t: -np.abs(h + r - t).sum(axis=1), 2.0),
    "graphs.gcn": nodes(graphs.gcn, gcn, "symmetric", hidden=10),
    "graphs.graphsage": nodes(graphs.graphsage, graphsage, "mean", hidden=4),
    "graphs.Sampled": Model(
        lambda **given: sampled(graphs.Sampled(7, CLASSES, hidden=4, dropout=0.0), **given),
        of_sampled,
        batch(itself=False),
        RNG.integers(0, CLASSES, 4),
    ),
    "graphs.SampledAttention": Model(
        lambda **given: sampled(graphs.SampledAttention(7, CLASSES, hidden=3, heads=2, dropout=0.0), **given),
        of_sampled_attention,
        batch(itself=True),
        RNG.integers(0, CLASSES, 4),
    ),
    "graphs.gat": nodes(graphs.gat, gat, "none", hidden=3, heads=2),
}
