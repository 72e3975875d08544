"""Published graphs whose nodes are classified, read from a folder: citations in two forms, and those of the OGB.

Edges are taken as undirected, each once, and those of a node to itself are left out, as `adjacency` adds its own. What
is to choose a model by is `info["valid"]`, node positions. Left out: graphs whose nodes have several labels.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError, public
from ..ranges import Seed
from .dataset import GraphData
from .formats import numbers, opened, read_rows
from .pickled import MOST, read_lists, read_matrix
from .sources import find

Folder = str | os.PathLike[str]
PLANETOID = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
CLASSES = 1 << 16  # more than any published graph has
TRAIN, VALID, TEST = 20, 500, 1000  # nodes to train on, of each class, to choose by, and to test on, as is usual


@public
def planetoid(folder: Folder, name: str) -> GraphData:
    """Papers and their citations, by `name` "cora", "citeseer" or "pubmed", from the files of Planetoid.

    These are `ind.<name>.x`, `.y`, `.tx`, `.ty`, `.allx`, `.ally`, `.graph` and `.test.index`, with the split that is
    reported: 20 nodes of each class to train on, 500 to choose by, 1,000 to test on.

    The files are pickles, which could run code; only what arrays and lists need is read of them, and nothing is run.
    Isolated test nodes of citeseer have no features and class 0, as usual. DataError for files that are missing,
    damaged, or do not fit each other. Z. Yang, W. Cohen and R. Salakhutdinov, "Revisiting Semi-Supervised Learning with
    Graph Embeddings", ICML 2016; published at github.com/kimiyoung/planetoid.
    """
    files = find(name, [f"ind.{name}.{part}" for part in PLANETOID], root=folder).files
    x, y, tx, ty, allx, ally = matrices = [read_matrix(file) for file in files[:6]]
    test = numbers([row[0] for row in read_rows(files[7], 1)], files[7].name, "int64")
    nodes = len(allx) + int(test.max() - test.min()) + 1  # those between that lack in tx are isolated
    fits = len(x) == len(y) <= len(allx) == len(ally) and len(tx) == len(ty) == len({*test.tolist()}) == len(test)
    widths = [a.shape[1] if a.ndim == 2 else 0 for a in matrices]
    alike = len({*widths[::2]}) == len({*widths[1::2]}) == 1 and 0 not in widths
    if not fits or not alike or test.min() != len(allx) or nodes * (widths[0] + widths[1]) > MOST:
        shapes = ", ".join(f"{part} {list(a.shape)}" for part, a in zip(PLANETOID, matrices))
        raise DataError(
            f"{name}: files do not fit each other: {shapes}, {len(test)} test nodes {test.min()} to {test.max()}",
            fix="take all files of one data set, as they were published",
        )
    features, hot = (np.zeros((nodes, width), np.float32) for width in widths[:2])
    features[: len(allx)], hot[: len(ally)], features[test], hot[test] = allx, ally, tx, ty
    near = read_lists(files[6])
    firsts = np.repeat(np.array([*near], np.int64), [len(found) for found in near.values()])
    seconds = np.array([node for found in near.values() for node in found], np.int64)
    edges = undirected(np.stack([firsts, seconds], axis=1), nodes, files[6])
    valid = np.arange(len(y), min(len(y) + VALID, len(ally)))
    info = {"classes": tuple(map(str, range(widths[1]))), "valid": valid}
    return GraphData(features, hot.argmax(axis=1), edges, np.arange(len(y)), np.sort(test), info)


@public
def citations(folder: Folder, name: str, *, seed: Seed = 0) -> GraphData:
    """Papers and their citations, by `name` "cora" or "citeseer", from the text files in which they were first given.

    `<name>.content` has a row for each paper: its id, its words as numbers, and its class; `<name>.cites` has pairs of
    ids, of which those are left out that name a paper without words. Nothing says what is trained on, so this is drawn
    by `seed`: 20 nodes of each class, or half of a smaller one; of the others 500 to choose by and 1,000 to test on, or
    one third and the rest. Results are thus not those of `planetoid`, which has the split of the papers.

    DataError for files that are missing, damaged, or do not fit each other. P. Sen et al., "Collective Classification
    in Network Data", AI Magazine 29, 2008; published at linqs.org/datasets.
    """
    content, cites = find(name, [f"{name}.content", f"{name}.cites"], root=folder).files
    with opened(content) as stream:
        width = stream.readline(MOST).count(b"\t") + 1
        parts = iter(partial(stream.read, 1 << 20), b"")
        fields = width + sum(part.count(b"\t") + part.count(b"\n") for part in parts)
    if width < 3 or fields > MOST:
        raise DataError(
            f"{content} has {width} columns and {fields:,} fields in all",
            fix=f"each line needs an id, words and a class, separated by tabs; up to {MOST:,} fields are read",
        )
    rows = read_rows(content, width, "\t")
    place = {row[0]: n for n, row in enumerate(rows)}
    if len(place) < len(rows):
        twice = next(row[0] for n, row in enumerate(rows) if place[row[0]] != n)
        raise DataError(f"{content} has the paper {twice!r:.60} twice", fix="take the file as it was published")
    features = np.stack([numbers(row[1:-1], f"words of {row[0]:.40}") for row in rows])
    classes, y = np.unique([row[-1] for row in rows], return_inverse=True)
    known = [(place[a], place[b]) for a, b in read_rows(cites, 2, "\t") if a in place and b in place]
    if not known:
        raise DataError(f"{cites} cites no paper of {content.name}", fix="take both files of one data set")
    edges = undirected(np.array(known, np.int64), len(rows), cites)
    train, valid, test = _drawn(y, len(classes), np.random.default_rng(seed))
    info = {"classes": tuple(map(str, classes)), "valid": valid}
    return GraphData(features, y.astype(np.int64), edges, train, test, info)


def _drawn(y: NDArray[Any], classes: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], ...]:
    """Nodes to train on, as many of each class, to choose by, and to test on, increasing."""
    order = rng.permutation(len(y))
    each = [order[y[order] == c] for c in range(classes)]
    train = np.concatenate([nodes[: min(TRAIN, len(nodes) // 2)] for nodes in each])
    rest = order[~np.isin(order, train)]
    count = min(VALID, len(rest) // 3)
    return np.sort(train), np.sort(rest[:count]), np.sort(rest[count:][:TEST])


@public
def ogb(folder: Folder) -> GraphData:
    """A graph of the Open Graph Benchmark whose nodes have one class, such as ogbn-arxiv, from its unpacked archive.

    In `folder` lie `raw/edge.csv.gz`, `raw/node-feat.csv.gz` and `raw/node-label.csv.gz`, and below `split/` a folder
    with `train.csv.gz`, `valid.csv.gz` and `test.csv.gz`. DataError for files that are missing, damaged, or do not fit
    each other. W. Hu et al., "Open Graph Benchmark: Datasets for Machine Learning on Graphs", NeurIPS 2020.
    """
    root = Path(folder)
    edge, feature, label = find(root.name, ["edge.csv", "node-feat.csv", "node-label.csv"], root=root / "raw").files
    splits = sorted(path.parent for path in root.glob("split/*/train.csv*"))
    if len(splits) != 1:
        raise DataError(f"{root} has {len(splits)} splits", fix="unpack the archive, with one folder below split/")
    split = find(root.name, ["train.csv", "valid.csv", "test.csv"], root=splits[0]).files
    features, y = _table(feature, "float32"), _table(label, "int64", 1)[:, 0]
    if len(features) != len(y):
        raise DataError(f"{label} has {len(y)} rows, {feature.name} {len(features)}", fix="unpack the archive again")
    if strange := [c for c in (y.min(), y.max()) if not 0 <= c < CLASSES]:  # each up to the last gets a name
        raise DataError(f"{label} has the class {strange[0]}", fix="unpack the archive again")
    edges = undirected(_table(edge, "int64", 2), len(y), edge)
    train, valid, test = (_table(file, "int64", 1)[:, 0] for file in split)
    for file, part in zip(split, (train, valid, test)):
        _check_nodes(part, len(y), file)
    info = {"classes": tuple(map(str, range(y.max() + 1))), "valid": valid}
    return GraphData(features, y, edges, train, test, info)


def undirected(edges: NDArray[np.int64], nodes: int, file: Path) -> NDArray[np.int64]:
    """Each pair of different nodes once, the smaller first; DataError for a node that is not there."""
    _check_nodes(edges, nodes, file)
    low, high = edges.min(axis=1), edges.max(axis=1)
    keys = np.unique((low * nodes + high)[low < high])
    return np.stack([keys // nodes, keys % nodes], axis=1)


def _check_nodes(ids: NDArray[np.int64], nodes: int, file: Path) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < nodes:
        raise DataError(
            f"{file} names nodes {ids.min()} to {ids.max()}, there are {nodes}", fix="take all files of one data set"
        )


def _table(file: Path, dtype: str, columns: int | None = None) -> NDArray[Any]:
    """Numbers separated by commas, without a header, (rows, columns)."""
    try:
        with opened(file) as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a file without rows
            found: NDArray[Any] = np.loadtxt(stream, dtype, delimiter=",", ndmin=2, comments=None)
    except ValueError as error:
        raise DataError(f"{file}: {error}", fix="unpack the archive again") from error
    if not found.size or columns not in (None, found.shape[1]):
        raise DataError(
            f"{file} has {found.shape[1] if found.size else 'no'} columns, expected {columns or 'some'}",
            fix="graphs whose nodes have one class are read; unpack the archive again",
        )
    return found
