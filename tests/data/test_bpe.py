"""Byte pairs: the words of GPT-2, merges as a plain slow form makes them, any bytes and back, the files."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DataError
from hetu.data.bpe import BYTES, ORDER, SIGNS, BytePairs, as_signs, cut, of_signs, words

TEXT = "the cat sat on the mat, the rat sat on the hat; that's 2 cats & 33 rats — naïve Café 日本語 aaaa aaaaa\n\n"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Hello world", ["Hello", " world"]),
        ("it's we'll I'd you've", ["it", "'s", " we", "'ll", " I", "'d", " you", "'ve"]),
        ("they're I'm can't 'so", ["they", "'re", " I", "'m", " can", "'t", " '", "so"]),
        ("a  b   c", ["a", " ", " b", "  ", " c"]),
        ("x \n\n y\n", ["x", " \n\n", " y", "\n"]),
        ("in 1984, 12%!?", ["in", " 1984", ",", " 12", "%!?"]),
        ("snake_case _x", ["snake", "_", "case", " _", "x"]),
        ("½² Ⅳx", ["½²", " Ⅳ", "x"]),
        ("tab\tend  ", ["tab", "\t", "end", "  "]),
        ("a\u00a0b\x1fc", ["a", "\u00a0", "b", "\x1f", "c"]),
        ("", []),
    ],
)
def test_a_text_is_cut_as_gpt2_cuts_it(text, wanted):
    assert cut(text) == wanted


def test_every_sign_is_a_letter_a_number_a_blank_or_another():
    """Of many, that of the Unicode category; put between two letters and two commas, kinds fall apart."""
    kinds = {"L": 1, "N": 2}
    blanks = {*"\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000", *map(chr, range(0x2000, 0x200B))}
    for c in map(chr, [*range(0x3100), *range(0x3100, sys.maxunicode, 89)]):
        if c in blanks or c in "'" or 0xD800 <= ord(c) < 0xE000:
            continue
        kind = kinds.get(unicodedata.category(c)[0], 3)
        found = len(words().match(f"a{c}").group()) == 2, len(words().match(f"1{c}").group()) == 2
        assert found == (kind == 1, kind == 2), (c, unicodedata.category(c))
    assert all(cut(f"a{c}a") == ["a", c, "a"] for c in blanks - {" "})


def test_the_table_of_bytes_is_that_of_gpt2():
    assert SIGNS[ord(" ")] == "Ġ" and SIGNS[ord("\n")] == "Ċ" and SIGNS[ord("!")] == "!" and SIGNS[0xAD] == "Ń"
    assert len(BYTES) == 256 and {*map(ord, BYTES)} == {*range(0x21, 0x7F), *range(0xA1, 0x144)} - {0xAD}
    assert [chr(b) for b in ORDER[:3]] == ["!", '"', "#"] and ORDER[188] == 0


def plain(text: str, size: int) -> list[tuple[bytes, bytes]]:
    """Every pair counted again after every merge, of pieces as bytes."""
    rows = [[bytes([b]) for b in word.encode()] for word in cut(text)]
    place = {bytes([b]): n for n, b in enumerate(ORDER)}
    merges: list[tuple[bytes, bytes]] = []
    while 256 + len(merges) < size:
        counts = Counter(pair for row in rows for pair in pairwise(row))
        often = max(counts.values(), default=0)
        if often < 2:
            break
        pair = min((p for p in counts if counts[p] == often), key=lambda p: (place[p[0]], place[p[1]]))
        place.setdefault(pair[0] + pair[1], 256 + len(merges))
        merges.append(pair)
        rows = [joined(row, pair) for row in rows]
    return merges


def joined(row: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    for n in range(len(row) - 1):
        if (row[n], row[n + 1]) == pair:
            return [*row[:n], pair[0] + pair[1], *joined(row[n + 2 :], pair)]
    return row


def plainly_encoded(text: str, merges: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Each merge in turn, over all of each word."""
    pieces = []
    for word in cut(text):
        row = [bytes([b]) for b in word.encode()]
        for pair in merges:
            row = joined(row, pair)
        pieces += row
    return pieces


def samples() -> list[str]:
    plays = ht.data.shakespeare("test")
    rng = np.random.default_rng(0)
    few = ["".join(rng.choice([*"ab "], 200)) for _ in range(3)]
    return [TEXT, "aaaaaaa aaaaa aaa", plays.decode(plays.codes[:3000]), *few]


@pytest.mark.parametrize("n", range(6))
def test_merges_and_ids_are_those_of_the_plain_form(n):
    text = samples()[n]
    tokens = BytePairs.train(text, 300)
    assert tokens.merges == plain(text, 300)
    other = text[::-1] + TEXT
    assert [tokens.pieces[i] for i in tokens.encode(other)] == plainly_encoded(other, tokens.merges)


def test_any_bytes_come_back():
    tokens, rng = BytePairs.train(TEXT, 280), np.random.default_rng(0)
    for given in (bytes(range(256)), rng.bytes(2000), b"", b"\xff\xfe\xed\xa0\x80", TEXT.encode()):
        assert tokens.decode_bytes(tokens.encode(given)) == given
    for text in (TEXT, "🙂 \udc80\r\n", "".join(map(chr, [*range(1, 0xD800, 7), *range(0xE000, 0x11000, 5)]))):
        assert tokens.decode_bytes(tokens.encode(text)) == text.encode("utf-8", "surrogateescape")
    assert tokens.decode(tokens.encode("日")[:-1]) == "\ufffd"
    assert tokens.encode("").dtype == np.int64


def test_files_in_the_form_of_gpt2(tmp_path):
    tokens = BytePairs.train(TEXT, 270, names=["<|endoftext|>", "[MASK]"])
    tokens.save(tmp_path)
    kept = json.loads((tmp_path / "vocab.json").read_text("utf-8"))
    lines = (tmp_path / "merges.txt").read_text("utf-8").splitlines()
    assert kept["!"] == 0 and all(kept[line.replace(" ", "")] == 255 + n for n, line in enumerate(lines) if n)
    assert kept["<|endoftext|>"] == 270 and list(kept.values()) == [*range(272)] and lines[0] == "#version: 0.2"
    again = BytePairs.load(tmp_path)
    assert (again.vocabulary, again.merges) == (tokens.vocabulary, tokens.merges)
    assert again.id("[MASK]") == 271
    assert again.encode(TEXT).tolist() == tokens.encode(TEXT).tolist()
    assert all(of_signs(as_signs(piece)) == piece for piece in tokens.vocabulary)
    assert of_signs("<a name>") == b"<a name>"  # a blank is no sign of the table


def test_ids_of_a_vocabulary_that_was_written_by_hand(tmp_path):
    """As in published files, ids need not follow the merges."""
    signs = {SIGNS[b]: n for n, b in enumerate(ORDER)}
    (tmp_path / "vocab.json").write_text(json.dumps({**signs, "Ġhi": 256, "hi": 257, "<|endoftext|>": 258}), "utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\nĠ hi\n", "utf-8")
    tokens = BytePairs.load(tmp_path)
    assert tokens.encode("hi hi ih").tolist() == [257, 256, signs["Ġ"], signs["i"], signs["h"]]
    assert tokens.decode([257, 258, 256]) == "hi<|endoftext|> hi"


BROKEN = {
    "no files": (None, None, "no tokenizer in"),
    "a list": ("[]", "", "vocab.json holds a list"),
    "no JSON": ("{", "", "no tokenizer in"),
    "few bytes": ('{"a": 0}', "", r"the vocabulary lacks b'.*', one of 255"),
    "a gap": ('{"a": 5}', "", "a vocabulary of 1 pieces has the id 5"),
    "no number": ('{"a": "0"}', "", "has the id '0'"),
    "twice": ('{"a": 0, "b": 0}', "", "two pieces of the vocabulary have one id"),
    "three": ("all", "#version: 0.2\na b c\n", "line 2 of merges.txt is no pair"),
    "unknown": ("all", "a b\n", "the vocabulary lacks b'ab', one of 1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_say_what_is_broken(case, tmp_path):
    vocabulary, merges, said = BROKEN[case]
    every = json.dumps({SIGNS[b]: n for n, b in enumerate(ORDER)})
    if vocabulary is not None:
        (tmp_path / "vocab.json").write_text(every if vocabulary == "all" else vocabulary, "utf-8")
        (tmp_path / "merges.txt").write_text(merges, "utf-8")
    with pytest.raises(DataError, match=said):
        BytePairs.load(tmp_path)


def test_what_is_no_text_or_id_is_refused():
    tokens = BytePairs.train("", 256)
    with pytest.raises(DataError, match="half of a surrogate pair"):
        tokens.encode("\ud800")
    with pytest.raises(DataError, match="id 256 is not one of 256 pieces"):
        tokens.decode([256])
    with pytest.raises(ArgumentError, match="no piece 'bed'"):
        tokens.id("bed")
    with pytest.raises(ArgumentError, match="size=255, wanted 256 at least"):
        BytePairs.train("a", 255)


def test_remembered_words_are_bounded(monkeypatch):
    monkeypatch.setattr("hetu.data.bpe.KEPT_WORDS", 3)
    tokens = BytePairs.train(TEXT, 280)
    assert tokens.decode(tokens.encode(TEXT)) == TEXT
    assert len(tokens._known) <= 3
