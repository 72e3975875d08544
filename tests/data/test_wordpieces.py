"""Word pieces: texts cut as BERT cuts them, and the files of a vocabulary, whole and damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DataError
from hetu.data.wordpieces import LONGEST

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[MASK]",
    "the",
    "un",
    "##aff",
    "##able",
    "low",
    "##er",
    "!",
    "'",
    "中",
    "ca",
    "##fe",
]
PIECES += ["The", "[", "]", "mask", "σ", "##σ", "##é", "s", "-", "$", "\u200d"]
VOCABULARY = {piece: i for i, piece in enumerate(PIECES)}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("unaffable", ["un", "##aff", "##able"]),
        ("The LOWER, the\tlow!", ["the", "low", "##er", "[UNK]", "the", "low", "!"]),
        ("cafe café cafe\u0301", ["ca", "##fe"] * 3),
        ("中the中", ["中", "the", "中"]),
        ("un\u200daff\x00able\ufffd", ["un", "##aff", "##able"]),
        ("low\u00a0the\u3000low\r\nthe", ["low", "the", "low", "the"]),
        ("the's -$", ["the", "'", "s", "-", "$"]),
        ("ΣΣ", ["σ", "##σ"]),
        ("[MASK]", ["[", "mask", "]"]),
        ("unlow", ["[UNK]"]),
        ("low" * LONGEST, ["[UNK]"]),
        (" \n", []),
        ("", []),
    ],
)
def test_a_text_is_cut_as_bert_cuts_it(text, wanted):
    assert [PIECES[i] for i in ht.data.WordPieces(VOCABULARY).encode(text)] == wanted


def test_case_and_accents_count_where_a_model_tells_them_apart():
    tokens = ht.data.WordPieces(VOCABULARY, lower=False)
    assert [PIECES[i] for i in tokens.encode("The the sé LOW")] == ["The", "the", "s", "##é", "[UNK]"]


def test_ids_are_numbers_and_texts_again():
    tokens = ht.data.WordPieces(VOCABULARY)
    ids = tokens.encode("unaffable lower")
    assert ids.dtype == np.int64 and tokens.decode(ids) == "unaffable lower" and len(tokens) == len(PIECES)
    with pytest.raises(DataError, match=r"id 99 is not one of 26 pieces[^§]*ids are 0 to 25"):
        tokens.decode([99])
    with pytest.raises(ArgumentError, match=r"no piece '\[MASKS\]'[^§]*did you mean '\[MASK\]'"):
        tokens.id("[MASKS]")
    with pytest.raises(ArgumentError, match=r"no piece '\[UNK\]'[^§]*pass a vocabulary that has '\[UNK\]'"):
        ht.data.WordPieces({})


@pytest.mark.parametrize("lower", [True, False])
def test_a_vocabulary_is_read_as_it_was_written(tmp_path, lower):
    ht.data.WordPieces(VOCABULARY, lower=lower).save(tmp_path)
    found = ht.data.WordPieces.load(tmp_path)
    assert found.vocabulary == VOCABULARY and found.lower == lower
    (tmp_path / "vocab.txt").unlink()
    told = {"model": {"type": "WordPiece", "vocab": VOCABULARY}, "normalizer": {"lowercase": lower}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    found = ht.data.WordPieces.load(tmp_path)
    assert found.vocabulary == VOCABULARY and found.lower == lower


def whole(**model):
    return json.dumps({"model": {"type": "WordPiece", "vocab": VOCABULARY} | model, "normalizer": {"lowercase": True}})


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("vocab.txt", "", r"no piece '\[UNK\]'"),
        ("vocab.txt", "[UNK]\nlow\nhigh\nlow\n", "has 'low' 2 times"),
        ("vocab.txt", b"[UNK]\n\xff\n", "can't decode"),
        ("tokenizer_config.json", "{", "Expecting property name"),
        ("tokenizer_config.json", "[]", "no tokenizer in"),
        ("tokenizer.json", "[]", "no tokenizer in"),
        ("tokenizer.json", whole(type="BPE"), "of the kind 'BPE'"),
        ("tokenizer.json", whole(vocab={"[UNK]": 1}), "has the id 1"),
        ("tokenizer.json", whole(vocab={"[UNK]": 0, "a": 0}), "two pieces of the vocabulary have one id"),
        ("tokenizer.json", whole(vocab=5), "no tokenizer in"),
        ("other", "", "No such file"),
    ],
)
def test_a_damaged_vocabulary_is_told(tmp_path, file, text, said):
    if file == "tokenizer_config.json":
        (tmp_path / "vocab.txt").write_text("[UNK]\n")
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=said) as told:
        ht.data.WordPieces.load(tmp_path)
    assert told.value.fix == "copy vocab.txt or tokenizer.json of the model"
