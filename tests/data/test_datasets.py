"""The data sets by name: shipped files, splits that never change, and the full public formats in miniature."""

from __future__ import annotations

import struct
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hetu import data
from hetu.core.errors import DataError
from hetu.data import formats


@pytest.fixture(autouse=True)
def _no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETU_DATA", raising=False)


@pytest.mark.parametrize(
    ("load", "sizes"),
    [
        (data.mnist, (4000, 1000)),
        (data.fashion_mnist, (3000, 600)),
        (data.adult, (26_049, 6_512)),
        (data.seattle_weather, (1096, 365)),
        (data.shakespeare, (932_833, 103_648)),
    ],
)
def test_train_and_test_are_the_whole(load, sizes: tuple[int, int]) -> None:
    train, test, whole = (load(split) for split in ("train", "test", "all"))
    assert (len(train), len(test)) == sizes and len(whole) == sum(sizes)
    columns = [(p.codes,) if isinstance(p, data.TextData) else p.arrays for p in (train, test, whole)]
    for a, b, both in zip(*columns):
        np.testing.assert_array_equal(np.concatenate([a, b]), both)


@pytest.mark.parametrize("load", [data.mnist, data.fashion_mnist])
def test_images_are_floats_between_zero_and_one(load) -> None:
    x, y = load("test").arrays
    assert x.dtype == np.float32 and y.dtype == np.int64
    assert x.min() == 0 and x.max() == 1
    assert set(y) == set(range(10))


def test_mnist_is_shuffled_before_it_is_cut() -> None:
    y = data.mnist("test").arrays[1]
    assert np.bincount(y, minlength=10).min() > 70
    assert y[:5].tolist() == data.mnist("all").arrays[1][4000:4005].tolist()


def test_adult_codes_lie_inside_their_vocabularies() -> None:
    adult = data.adult("all")
    numeric, categorical, y = adult.arrays
    sizes = [len(values) for values in adult.info["categorical"].values()]
    assert (categorical.max(axis=0) + 1).tolist() == sizes
    assert numeric.shape[1] == len(adult.info["numeric"]) and round(float(y.mean()), 3) == 0.241


def test_weather_persistence_matches_the_published_baseline() -> None:
    weather = data.seattle_weather("all")
    highs = weather.arrays[0][:, weather.info["columns"].index("temp_max")]
    assert round(float(np.abs(np.diff(highs)[-365:]).mean()), 2) == 2.24
    assert data.seattle_weather("test").info["date"][0] == "2015/01/01"


def test_noun_graph_is_homophilous_and_its_parts_are_disjoint() -> None:
    graph = data.wordnet_nouns()
    assert round(float((graph.y[graph.edges[:, 0]] == graph.y[graph.edges[:, 1]]).mean()), 3) == 0.915
    assert np.bincount(graph.y[graph.train]).tolist() == [20] * 7
    assert not set(graph.train) & set(graph.test)
    assert int(graph.features.sum()) == 13071


def test_knowledge_graph_parts_share_one_code_and_test_only_known_entities() -> None:
    train, valid, test, whole = (data.wordnet_kg(s) for s in ("train", "valid", "test", "all"))
    assert len(train) == 11_506 and len(whole) == 12_706
    known = set(train.arrays[0]) | set(train.arrays[2])
    for part in (valid, test):
        assert 500 < len(part) <= 600
        assert set(part.arrays[0]) | set(part.arrays[2]) <= known
        assert part.info == train.info


def test_words_are_spelled_and_said_and_no_word_is_in_both_parts() -> None:
    train, test, whole = (data.cmudict(part) for part in ("train", "test", "all"))
    assert len(train) == 8157 and len(test) == 906 and len(whole) == 9063 and len(train.info["sounds"]) == 3 + 39
    assert not {*map(bytes, train.arrays[0])} & {*map(bytes, test.arrays[0])} and train.info == test.info
    letters, sounds = whole.arrays
    row = [*map(bytes, letters)].index(np.array([3, 2, 21] + [0] * 13).tobytes())  # b, a, t
    assert [whole.info["sounds"][i] for i in sounds[row]] == ["begin", "B", "AE", "T", "end", *[""] * 13]


def test_a_dictionary_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "cmudict.dict").write_text(
        "cat K AE1 T # pet\ncat(2) K AA0 T\n3d TH R IY2 D IY1\nlonger L AO1\nan AE1 N\n"
    )
    words = data.cmudict("all", root=tmp_path, longest=4)
    assert words.info["sounds"] == ("", "begin", "end", "AE", "K", "N", "T")
    assert sorted(words.arrays[1].tolist()) == [[1, 3, 5, 2, 0, 0], [1, 4, 3, 6, 2, 0]]
    (tmp_path / "cmudict.dict").write_text("only\n")
    with pytest.raises(DataError, match="has no word of at most 16 letters[^§]*`cat K AE1 T`"):
        data.cmudict(root=tmp_path)


def write_idx(path: Path, array: np.ndarray) -> None:
    path.write_bytes(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes())


@pytest.mark.parametrize("load", [data.mnist, data.fashion_mnist])
def test_full_mnist_format(tmp_path: Path, load) -> None:
    for part, n in (("train", 5), ("t10k", 2)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", np.full((n, 28, 28), 255, np.uint8))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", np.arange(n, dtype=np.uint8))
    assert [len(load(s, root=tmp_path)) for s in ("train", "test", "all")] == [5, 2, 7]
    x, y = load("test", root=tmp_path).arrays
    assert x.min() == 1 and y.tolist() == [0, 1]


def test_more_images_than_labels_are_refused(tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", np.zeros((3, 28, 28), np.uint8))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", np.zeros(2, np.uint8))
    with pytest.raises(DataError, match="x has 3, y has 2"):
        data.mnist(root=tmp_path)


def test_cifar10_binary_format(tmp_path: Path) -> None:
    for i, name in enumerate([f"data_batch_{k}.bin" for k in range(1, 6)] + ["test_batch.bin"]):
        (tmp_path / name).write_bytes(bytes([i]) + bytes([51]) * 3072)
    x, y = data.cifar10("train", root=tmp_path).arrays
    assert x.shape == (5, 3, 32, 32) and np.all(x == np.float32(0.2)) and y.tolist() == [0, 1, 2, 3, 4]
    assert data.cifar10("test", root=tmp_path).arrays[1].tolist() == [5]


def test_adult_public_format(tmp_path: Path) -> None:
    row = "39, State-gov, 77516, {}, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, ?, {}\n"
    (tmp_path / "adult.data").write_text(row.format("Bachelors", "<=50K") + row.format("11th", ">50K"))
    (tmp_path / "adult.test").write_text("|1x3 Cross validator\n" + row.format("Doctorate", ">50K."))
    train, test = data.adult("train", root=tmp_path), data.adult("test", root=tmp_path)
    assert train.arrays[2].tolist() == [0, 1] and test.arrays[2].tolist() == [1]
    assert train.info["categorical"]["education"] == ("11th", "Bachelors", "Doctorate")
    assert train.arrays[1][:, 1].tolist() == [1, 0] and test.arrays[1][:, 1].tolist() == [2]
    assert train.arrays[0][0].tolist() == [39, 77516, 13, 2174, 0, 40]


def test_criteo_public_format(tmp_path: Path) -> None:
    line = "\t".join(["1", "-3", "", *["7"] * 11, "", *["0000000b"] * 25])
    (tmp_path / "train.txt").write_text(f"{line}\n" * 14)
    train = data.criteo("train", root=tmp_path, buckets=10)
    assert len(train) == 12 and len(data.criteo("test", root=tmp_path)) == 2
    assert len(data.criteo("all", root=tmp_path, rows=3)) == 3
    np.testing.assert_allclose(train.arrays[0][0], [0, 0] + [np.log(8)] * 11, rtol=1e-6)
    assert train.arrays[1][0].tolist() == [0] + [1 + 11 % 9] * 25


def clicks(path: Path, rows: int, seed: int = 0) -> None:
    """Rows in Criteo's form, of which some fields are missing."""
    rng = np.random.default_rng(seed)
    with open(path, "w") as file:
        for _ in range(rows):
            fields = [*map(str, rng.integers(-2, 99, 13)), *(f"{n:08x}" for n in rng.integers(0, 1 << 32, 26))]
            shown = [field if there else "" for field, there in zip(fields, rng.random(39) < 0.9)]
            file.write("\t".join([str(rng.integers(2)), *shown]) + "\n")


@pytest.mark.parametrize("rows", [None, 1, 100, 101])
def test_criteo_on_the_disk_is_what_it_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows) -> None:
    monkeypatch.setattr(formats, "BLOCK", 50)
    clicks(tmp_path / "train.txt", 149)
    for split in ("all", "train", "test") if rows != 1 else ("all",):
        whole = data.criteo(split, root=tmp_path, rows=rows, buckets=11)
        on_disk = data.criteo(split, root=tmp_path, rows=rows, buckets=11, keep=tmp_path / "a/b")
        assert repr(on_disk) == repr(whole) and on_disk.info == whole.info
        assert all(map(np.array_equal, whole.arrays, on_disk.arrays))
        assert not any(column.flags.owndata or column.flags.writeable for column in on_disk.arrays)
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == ["categorical", "numeric", "told.json", "y"]


def test_criteo_on_the_disk_is_written_once_and_again_where_it_is_of_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = tmp_path / "kept", []
    blocks = formats.criteo_blocks

    def counted(*given):
        read.append(given)
        yield from blocks(*given)

    monkeypatch.setattr(formats, "criteo_blocks", counted)
    clicks(tmp_path / "train.txt", 30)
    load = partial(data.criteo, "all", root=tmp_path, keep=folder)
    first = load()
    assert np.array_equal(load().arrays[1], first.arrays[1]) and len(read) == 1
    assert len(load(rows=7)) == 7 and load(rows=7, buckets=3).arrays[1].max() < 3 and len(read) == 3
    clicks(tmp_path / "train.txt", 31, seed=1)
    assert len(load()) == 31 and len(read) == 4
    for name, left in (("numeric", 13 * 4 * 30), ("y", 7), ("categorical", 0), ("told.json", 5)):
        (folder / name).write_bytes((folder / name).read_bytes()[:left])
        assert len(load()) == 31
    assert len(read) == 8
    (tmp_path / "train.txt").write_text("1\t2\n")
    with pytest.raises(DataError, match="line 1: 2 fields, expected 40"):
        load()
    assert sorted(path.name for path in folder.iterdir()) == ["categorical", "numeric", "told.json", "y"]


def test_criteo_on_the_disk_takes_no_memory_for_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "BLOCK", 100)
    peaks = []
    for rows in (400, 2000):
        clicks(tmp_path / "train.txt", rows)
        tracemalloc.start()
        found = data.criteo("all", root=tmp_path, keep=tmp_path / str(rows))
        assert len(found[np.array([rows - 1, 3])][0]) == 2
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_a_folder_that_cannot_keep_columns_is_told(tmp_path: Path) -> None:
    clicks(tmp_path / "train.txt", 3)
    with pytest.raises(
        DataError, match=r"train.txt cannot keep columns: Not a directory(.|\n)*fix: pass a folder of yours"
    ):
        data.criteo("all", root=tmp_path, keep=tmp_path / "train.txt")


def movielens_100k(folder: Path) -> None:
    """Film 7 is Comedy and Drama, 3 is nothing known; the first rating is the latest."""
    rows = [f"{9 - 4 * (k % 2)}\t{7 if k % 3 else 3}\t{k % 5 + 1}\t{99 - k}\n" for k in range(20)]
    (folder / "u.data").write_text("".join(rows))
    (folder / "u.user").write_text("5|24|M|writer|85711\n9|7|F|other|V3N4P\n")
    flags = {"3": [0], "7": [5, 8]}
    flags = {film: "|".join(str(int(k in genres)) for k in range(19)) for film, genres in flags.items()}
    rows = [f"{film}|Caf\xe9 (1995)|01-Jan-1995||http://x|{on}" for film, on in flags.items()]
    (folder / "u.item").write_bytes("\n".join(rows).encode("latin-1"))


def movielens_1m(folder: Path) -> None:
    rows = (f"{9 - 4 * (k % 2)}::{7 if k % 3 else 3}::{k % 5 + 1}::{99 - k}\n" for k in range(20))
    (folder / "ratings.dat").write_text("".join(rows))
    (folder / "users.dat").write_text("5::M::25::writer::85711\n9::F::1::other::00000\n")
    (folder / "movies.dat").write_bytes("3::Caf\xe9\x85 (1995)::unknown\n7::B::Comedy|Drama\n".encode("latin-1"))


@pytest.mark.parametrize("write", [movielens_100k, movielens_1m])
def test_both_forms_of_movielens(tmp_path: Path, write) -> None:
    write(tmp_path)
    train, test, whole = (data.movielens(split, tmp_path) for split in ("train", "test", "all"))
    assert (len(train), len(test)) == (18, 2)
    user, item, stars = whole.arrays
    back = np.arange(20)[::-1]  # in order of time
    assert user.tolist() == [int(k % 2 == 0) for k in back] and item.tolist() == [int(k % 3 > 0) for k in back]
    assert stars.tolist() == (back % 5 + 1).tolist() and stars.dtype == np.float32
    np.testing.assert_array_equal(np.concatenate([train.arrays[1], test.arrays[1]]), item)
    info = whole.info
    assert (info["decade"], info["gender"], info["occupation"]) == (("00s", "20s"), ("F", "M"), ("other", "writer"))
    assert info["users"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert info["genre"] == ("Comedy", "Drama", "unknown") and info["genres"].tolist() == [[3, 0], [1, 2]]


def test_what_is_no_movielens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="movielens: .* lacks u.data, u.user, u.item") as caught:
        data.movielens(root=tmp_path)
    assert "ratings.dat, users.dat, movies.dat" in caught.value.fix
    movielens_1m(tmp_path)
    for stars in ("nan", "0", "6"):
        (tmp_path / "ratings.dat").write_text(f"5::3::{stars}::1\n")
        with pytest.raises(DataError, match=f"there is a rating of {stars}"):
            data.movielens("all", tmp_path)
    movielens_1m(tmp_path)
    (tmp_path / "movies.dat").write_text("3::A::Drama\n")
    with pytest.raises(DataError, match="ratings.dat has the number '7', movies.dat has not[\\s\\S]*one release"):
        data.movielens(root=tmp_path)
    (tmp_path / "users.dat").write_text("5::M::25::writer::85711\n9::F\n")
    with pytest.raises(DataError, match="users.dat, row 2: 2 fields, expected 5[\\s\\S]*separated by '::'"):
        data.movielens(root=tmp_path)
    (tmp_path / "users.dat").write_text("\n")
    with pytest.raises(DataError, match="users.dat has no rows"):
        data.movielens(root=tmp_path)


def test_any_knowledge_graph_in_three_files(tmp_path: Path) -> None:
    for name, line in (("train", "a\tr\tb\n"), ("valid", "b\tr\ta\n"), ("test", "b\ts\ta\n")):
        (tmp_path / f"{name}.txt").write_text(line)
    test = data.wordnet_kg("test", root=tmp_path)
    assert [c.tolist() for c in test.arrays] == [[1], [1], [0]]
    assert test.info == {"entities": ("a", "b"), "relations": ("r", "s")}


def test_any_text_shares_one_vocabulary_between_its_parts(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes(b"hello\r\nwor" + b"z")
    train, test = (data.text(tmp_path / "input.txt", s) for s in ("train", "test"))
    assert train.decode(train.codes) + test.decode(test.codes) == "hello\nworz"
    assert train.vocabulary == test.vocabulary
    assert len(data.shakespeare("all", root=tmp_path)) == 10


def test_weather_without_a_column_names_it(tmp_path: Path) -> None:
    (tmp_path / "seattle-weather.csv").write_text("date,precipitation,temp_max,temp_min,weather\n1,2,3,4,sun\n")
    with pytest.raises(DataError, match="lacks wind"):
        data.seattle_weather(root=tmp_path)


@pytest.mark.parametrize("load", [data.mnist, data.adult, data.cifar10, data.wordnet_kg])
def test_an_unknown_split_suggests_the_nearest(load) -> None:
    with pytest.raises(DataError) as caught:
        load("tran")
    assert caught.value.fix == "did you mean 'train'?"


@pytest.mark.parametrize("load", [data.cifar10, data.criteo, data.movielens])
def test_a_set_that_does_not_ship_says_where_to_put_it(load) -> None:
    with pytest.raises(DataError, match=load.__name__) as caught:
        load()
    assert f"$HETU_DATA/{load.__name__}" in caught.value.fix
