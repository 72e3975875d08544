"""Published graphs, in files written here in exactly their form; damaged ones, and pickles that would run code."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from hetu import data
from hetu.core.errors import DataError
from hetu.data import pickled

CLASSES, WORDS, TRAIN, KNOWN = 2, 6, 4, 10  # of 16 nodes: 10 before those to test on, of which node 13 is isolated
TEST = [12, 10, 15, 11, 14]


def text(raw: bytes) -> bytes:
    """A string of Python 2."""
    return b"U" + bytes([len(raw)]) + raw if len(raw) < 256 else b"T" + struct.pack("<i", len(raw)) + raw


def whole(number: int) -> bytes:
    if 0 <= number < 256:
        return b"K" + bytes([number])
    return b"M" + struct.pack("<H", number) if 0 <= number < 65536 else b"J" + struct.pack("<i", number)


def array(a: np.ndarray) -> bytes:
    """The steps of Python 2 and NumPy for an array."""
    kind = b"cnumpy\ndtype\n" + text(a.dtype.str[1:].encode()) + whole(0) + whole(1) + b"\x87R"
    kind += b"(" + whole(3) + text(a.dtype.str[:1].encode()) + b"NNN" + 2 * whole(-1) + whole(0) + b"tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + whole(0) + b"\x85" + text(b"b") + b"\x87R"
    shape = b"(" + b"".join(map(whole, a.shape)) + b"t"
    return made + b"(" + whole(1) + shape + kind + b"\x89" + text(a.tobytes()) + b"tb"


def csr(a: np.ndarray) -> bytes:
    """The steps of SciPy for a sparse matrix; its `_shape` is remembered, and a mark stands around its fields."""
    rows, columns = np.nonzero(a)
    starts = np.searchsorted(rows, np.arange(len(a) + 1)).astype("i4")
    fields = {"_shape": whole(a.shape[0]) + whole(a.shape[1]) + b"\x86", "format": text(b"csr"), "maxprint": whole(50)}
    fields |= {"indptr": array(starts), "indices": array(columns.astype("i4")), "data": array(a[rows, columns])}
    body = b"".join(text(name.encode()) + steps for name, steps in fields.items())
    return b"cscipy.sparse.csr\ncsr_matrix\nq\x01)\x81q\x02}q\x03(" + body + b"ub"


def lists(near: dict[int, list[int]]) -> bytes:
    steps = [whole(k) + b"](" + b"".join(map(whole, found)) + b"e" for k, found in near.items()]
    return b"ccollections\ndefaultdict\nc__builtin__\nlist\n\x85Rq\x01(" + b"".join(steps) + b"u"


def whole_pickle(steps: bytes) -> bytes:
    return b"\x80\x02" + steps + b"."


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray, set[tuple[int, int]]]:
    """A folder of Planetoid's files, and what is in them."""
    rng = np.random.default_rng(0)
    features = (rng.random((16, WORDS)) < 0.4).astype("f4")
    y = rng.integers(0, CLASSES, 16)
    features[13], y[13] = 0, 0
    hot = np.eye(CLASSES, dtype="i4")[y]
    pairs = [(i, j) for i, j in rng.integers(0, 16, (30, 2)).tolist() if 13 not in (i, j)]
    near: dict[int, list[int]] = {k: [] for k in range(16)}
    for i, j in pairs:
        near[i].append(j)
        near[j].append(i)
    files = {"x": csr(features[:TRAIN]), "tx": csr(features[TEST]), "allx": csr(features[:KNOWN])}
    files |= {"y": array(hot[:TRAIN]), "ty": array(hot[TEST]), "ally": array(hot[:KNOWN]), "graph": lists(near)}
    for name, steps in files.items():
        (tmp_path / f"ind.small.{name}").write_bytes(whole_pickle(steps))
    (tmp_path / "ind.small.test.index").write_text("".join(f"{node}\n" for node in TEST))
    return tmp_path, features, y, {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}


def test_planetoid(published):
    folder, features, y, pairs = published
    graph = data.planetoid(folder, "small")
    np.testing.assert_array_equal(graph.features, features)
    np.testing.assert_array_equal(graph.y, y)
    assert {*map(tuple, graph.edges.tolist())} == pairs and len(graph.edges) == len(pairs)
    assert (graph.train.tolist(), graph.test.tolist()) == (list(range(TRAIN)), sorted(TEST))
    assert graph.info["classes"] == ("0", "1") and graph.info["valid"].tolist() == list(range(TRAIN, KNOWN))
    assert (graph.features.dtype, graph.y.dtype, graph.edges.dtype) == ("float32", "int64", "int64")


def test_what_python_reads_of_such_a_pickle_is_read():
    """The writer of this file against the machine of Python, where no SciPy is needed."""
    a = np.arange(600, dtype="f8").reshape(20, 30)
    assert pickle.loads(whole_pickle(array(a)), encoding="latin1").tolist() == a.tolist()
    assert pickled.array(pickled.PickleMachine().play(whole_pickle(array(a)))).tolist() == a.tolist()
    found = pickle.loads(whole_pickle(lists({0: [1, 300], 70000: []})))
    assert (
        dict(found)
        == {0: [1, 300], 70000: []}
        == pickled.lists(pickled.PickleMachine().play(whole_pickle(lists({0: [1, 300], 70000: []}))), 99)
    )


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


EMPTY = np.zeros(0, "f4")
LONG = b"]q\x01(" + 500 * b"K\x01" + b"e"
SHARED = b"}(K\x00" + LONG + b"".join(whole(k) + b"h\x01" for k in range(1, 200)) + b"u"
WIDE = b")" + 20 * b"q\x09h\x09\x86"  # a pair of a pair of ..., each twice the same
DAMAGED = {
    "no pickle": ("x", b"PK\x03\x04", "cannot be read"),
    "cut short": ("x", whole_pickle(csr(np.ones((4, WORDS), "f4")))[:60], "ind.small.x cannot be read: "),
    "a number": ("x", whole_pickle(whole(3)), "it holds no array"),
    "a step of other pickles": ("y", pickle.dumps({1.5: 2}, 2), "its pickle does BINFLOAT at byte "),
    "fewer bytes than its shape says": ("y", whole_pickle(array(np.ones(3)))[:-30] + b"tb.", "cannot be read"),
    "an array of objects": ("y", whole_pickle(array(np.ones(4)).replace(b"f8", b"O8")), "numbers of the kind 'O8'"),
    "numbers of a kind that takes a megabyte to show": (
        "y",
        whole_pickle(array(np.ones(4)).replace(b"cnumpy\ndtype\n" + text(b"f8"), b"cos\nsystem\n" + WIDE)),
        "numbers of no kind",
    ),
    "a number in an array without axes": ("y", whole_pickle(array(np.ones(()))), r"an array of shape \[\]"),
    "a huge matrix": ("x", None, r"it says that it has 2147483647 x 2147483647 numbers"),
    "columns that are not there": ("x", None, "it has columns 0 to 5 of 2"),
    "rows that begin anywhere": ("x", None, "its rows do not begin where they should"),
    "texts in lists": ("graph", whole_pickle(b"}(K\x01](U\x01aeu"), "other things than whole numbers"),
    "one list many times": ("graph", whole_pickle(SHARED), "it holds more numbers than bytes"),
    "a node that is not there": ("graph", whole_pickle(lists({0: [16]})), "names nodes 0 to 16, there are 16"),
    "no dictionary": ("graph", whole_pickle(array(EMPTY)), "it holds no dictionary of lists"),
    "deep keys": ("graph", whole_pickle(b"}()" + 9 * b"\x85" + b"]u"), "keys that are neither numbers nor texts"),
    "rows of another file": (
        "y",
        whole_pickle(array(np.eye(3, 2, dtype="i4"))),
        "files do not fit each other: x .4, 6.",
    ),
    "other columns": ("tx", whole_pickle(csr(np.ones((5, 7), "f4"))), r"tx \[5, 7\]"),
    "no test nodes": ("test.index", b"", "has no rows"),
    "test nodes elsewhere": ("test.index", b"2\n3\n4\n5\n6\n", "5 test nodes 2 to 6"),
    "a test node far away": ("test.index", b"10\n11\n12\n13\n999999999\n", "5 test nodes 10 to 999999999"),
    "words": ("test.index", b"ten\n", "could not convert string to float: 'ten'"),
}
SIZES = whole(4) + whole(WORDS) + b"\x86"  # of x
HUGE = 2 * whole(2**31 - 1) + b"\x86"


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_files_are_told(published, what):
    folder, features, _, _ = published
    part, raw, said = DAMAGED[what]
    if raw is None:
        right = csr(features[:TRAIN])
        other = {
            "a huge": HUGE,
            "columns": whole(4) + whole(2) + b"\x86",
            "rows that": whole(3) + whole(WORDS) + b"\x86",
        }
        raw = whole_pickle(right.replace(SIZES, next(steps for name, steps in other.items() if what.startswith(name))))
    (folder / f"ind.small.{part}").write_bytes(raw)
    with pytest.raises(DataError, match=said):
        data.planetoid(folder, "small")


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4"])
def test_rows_that_begin_anywhere_are_refused_before_they_take_memory(tmp_path, kind):
    """Differences of starts overflow in their own kind, and a small file would say that a row has billions."""
    rng, right = np.random.default_rng(0), csr(np.ones((2, 1), "f4"))
    most = 2 if kind == "f4" else min(np.iinfo(kind).max, 250)
    for starts in [(0, 1, 2), (0, 2, 2), (0, most, 2), *rng.integers(0, most + 1, (40, 3)).tolist()]:
        (tmp_path / "x").write_bytes(
            whole_pickle(right.replace(array(np.arange(3, dtype="i4")), array(np.array(starts, kind))))
        )
        if kind != "f4" and 0 == starts[0] <= starts[1] <= starts[2] == 2:
            assert pickled.read_matrix(tmp_path / "x")[:, 0].tolist() == np.diff(starts).tolist()
            continue
        with pytest.raises(DataError, match="rows do not begin where they should"):
            pickled.read_matrix(tmp_path / "x")


def test_a_packed_file_takes_no_more_memory_than_a_published_one(tmp_path, monkeypatch):
    monkeypatch.setattr(pickled, "LONGEST", 1000)
    (tmp_path / "x").write_bytes(gzip.compress(whole_pickle(b"}" * 10**6)))
    with pytest.raises(DataError, match="it has more than 1000 bytes"):
        pickled.read_matrix(tmp_path / "x")


@pytest.mark.parametrize("seed", range(3))
def test_bytes_that_are_changed_anywhere_end_in_an_error_or_in_other_numbers(published, seed):
    rng, (folder, *_) = np.random.default_rng(seed), published
    for part in ("x", "graph", "y"):
        raw = (folder / f"ind.small.{part}").read_bytes()
        for place in rng.integers(0, len(raw), 60).tolist():
            changed = raw[:place] + bytes([rng.integers(0, 256)]) + raw[place + 1 :]
            (folder / f"ind.small.{part}").write_bytes(changed)
            try:
                data.planetoid(folder, "small")
            except DataError as error:
                assert "fix: " in str(error)
        (folder / f"ind.small.{part}").write_bytes(raw)


def test_nothing_of_a_file_is_run(published, tmp_path):
    folder, *_ = published
    ran = tmp_path / "ran"
    for protocol in range(5):
        (folder / "ind.small.x").write_bytes(pickle.dumps(Evil(ran), protocol))
        with pytest.raises(DataError, match="other pickles are not read, as these could run code"):
            data.planetoid(folder, "small")
    (folder / "ind.small.x").write_bytes(whole_pickle(b"cos\nsystem\n" + text(b"touch ran") + b"\x85R"))
    with pytest.raises(DataError, match="it holds no array"):
        data.planetoid(folder, "small")
    assert not ran.exists()


def test_a_missing_file_is_named(published):
    folder, *_ = published
    (folder / "ind.small.graph").unlink()
    with pytest.raises(DataError, match="lacks ind.small.graph"):
        data.planetoid(folder, "small")


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    """A folder in the first form of Cora: 60 papers of two classes, in a ring, and one without words."""
    rows = [f"p{n}\t{n % 2}\t{n // 2 % 2}\t1\t{'ab'[n % 3 == 0]}\n" for n in range(60)]
    (tmp_path / "small.content").write_text("".join(rows))
    ring = [f"p{n}\tp{(n + 1) % 60}\n" for n in range(60)]
    (tmp_path / "small.cites").write_text("".join(ring) + "p1\tp0\np3\tp3\np3\tlost\n")
    return tmp_path


def test_papers_in_their_first_form(papers):
    graph = data.citations(papers, "small")
    assert graph.features.tolist() == [[n % 2, n // 2 % 2, 1] for n in range(60)]
    assert graph.y.tolist() == [int(n % 3 == 0) for n in range(60)] and graph.info["classes"] == ("a", "b")
    assert {*map(tuple, graph.edges.tolist())} == {(n, n + 1) for n in range(59)} | {(0, 59)} and len(graph.edges) == 60
    assert (graph.features.dtype, graph.y.dtype, graph.edges.dtype) == ("float32", "int64", "int64")
    assert np.bincount(graph.y[graph.train]).tolist() == [20, 10]  # of 40, and of 20, of which half are left
    parts = graph.train.tolist(), graph.info["valid"].tolist(), graph.test.tolist()
    assert sorted(node for part in parts for node in part) == list(range(60)) and [len(part) for part in parts] == [
        30,
        10,
        20,
    ]
    assert all(part == sorted(part) for part in parts)
    again, other = data.citations(papers, "small"), data.citations(papers, "small", seed=1)
    assert again.train.tolist() == parts[0] != other.train.tolist()


TORN = [
    ("content", "p0\tx\n", "has 2 columns and 2 fields in all"),
    ("content", "p0\t1\ta\np0\t1\ta\n", "has the paper 'p0' twice"),
    ("content", "p0\t1\ta\np1\tone\ta\n", "'words of p1': could not convert string to float: 'one'"),
    ("content", "p0\t1\ta\np1\ta\n", "line 2: 2 fields, expected 3"),
    ("content", "p0\t1\t" + 200_000 * "a" + "\n", "field larger than field limit"),
    ("content", "", "has 1 columns and 1 fields in all"),
    ("cites", "q1\tq2\n", "cites no paper of small.content"),
    ("cites", "p1\n", "line 1: 1 fields, expected 2"),
]


@pytest.mark.parametrize(("part", "text", "said"), TORN, ids=[said for *_, said in TORN])
def test_torn_files_of_papers_are_told(papers, part, text, said):
    (papers / f"small.{part}").write_text(text)
    with pytest.raises(DataError, match=said):
        data.citations(papers, "small")


def test_papers_with_more_words_than_memory_holds_are_refused_before_they_are_read(papers, monkeypatch):
    monkeypatch.setattr("hetu.data.graph_sets.MOST", 299)
    with pytest.raises(DataError, match="has 5 columns and 300 fields in all"):
        data.citations(papers, "small")


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """A folder in the form of ogbn-arxiv."""
    files = {
        "raw/edge": "0,1\n1,0\n2,3\n3,3\n1,2\n",
        "raw/node-feat": "0.5,-1.0\n0.25,3\n1e-3,0\n7,8\n",
        "raw/node-label": "4\n0\n0\n2\n",
        "raw/num-node-list": "4\n",
        "raw/num-edge-list": "5\n",
        "split/time/train": "0\n2\n",
        "split/time/valid": "1\n",
        "split/time/test": "3\n",
    }
    for name, text in files.items():
        write(tmp_path, name, text)
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    path = folder / f"{name}.csv.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))


def test_ogb(unpacked):
    graph = data.ogb(unpacked)
    assert graph.features.tolist() == np.array([[0.5, -1], [0.25, 3], [1e-3, 0], [7, 8]], "f4").tolist()
    assert graph.y.tolist() == [4, 0, 0, 2] and graph.edges.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert [part.tolist() for part in (graph.train, graph.info["valid"], graph.test)] == [[0, 2], [1], [3]]
    assert graph.info["classes"] == ("0", "1", "2", "3", "4") and graph.features.dtype == "float32"


WRONG = [
    ("raw/edge", "0,1\n1,4\n", "names nodes 0 to 4, there are 4"),
    ("raw/edge", "0,1,2\n", "edge.csv.gz has 3 columns, expected 2"),
    ("raw/edge", "0,1\n1\n", "edge.csv.gz: "),
    ("raw/edge", "a,b\n", "edge.csv.gz: could not convert string 'a'"),
    ("raw/edge", "", "edge.csv.gz has no columns"),
    ("raw/node-label", "1\n2\n", "has 2 rows, node-feat.csv.gz 4"),
    ("raw/node-label", "1,0\n2,1\n0,0\n1,1\n", "has 2 columns, expected 1"),
    ("raw/node-label", "0\n1\n-1\n0\n", "has the class -1"),
    ("raw/node-label", "0\n1\n99999999999\n0\n", "has the class 99999999999"),
    ("split/time/test", "-1\n", "test.csv.gz names nodes -1 to -1, there are 4"),
    ("split/other/train", "0\n", "has 2 splits"),
]


@pytest.mark.parametrize(("name", "text", "said"), WRONG, ids=[row[-1] for row in WRONG])
def test_what_does_not_fit_is_told(unpacked, name, text, said):
    write(unpacked, name, text)
    with pytest.raises(DataError, match=said):
        data.ogb(unpacked)


def test_a_file_that_is_missing_or_cut_short_is_told(unpacked):
    path = unpacked / "raw" / "edge.csv.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="is damaged"):
        data.ogb(unpacked)
    path.unlink()
    with pytest.raises(DataError, match="lacks edge.csv"):
        data.ogb(unpacked)
