"""Word pieces: words cut into the longest pieces that a vocabulary has, as BERT does; reads `vocab.txt`.

J. Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019, section 3, with the vocabularies of
Y. Wu et al., "Google's Neural Machine Translation System", 2016, section 4.1. Left out: making a vocabulary, which
`BytePairs` does; names like `[MASK]` are ids to add, and in a text they are letters and brackets.
"""

from __future__ import annotations

import json
import os
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import index
from pathlib import Path
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from ..answers import AnswersCalls
from ..core.errors import ArgumentError, DataError, HetuError, did_you_mean, public
from ..files import write_text
from .bpe import KEPT_WORDS, numbered

INSIDE = "##"  # what a piece begins with that goes on with a word
LONGEST = 100  # letters of a word; a longer one is not known
IDEOGRAPHS = [  # each of which is a word
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2CEAF), (0x2F800, 0x2FA1F),
]  # fmt: skip


class _Written(dict[int, str]):
    """What stands for a sign while a text is cut: blanks around what is a word by itself, and nothing for controls."""

    def __init__(self, accents: bool) -> None:
        super().__init__()
        self.accents = accents

    def __missing__(self, code: int) -> str:
        sign, kind = chr(code), unicodedata.category(chr(code))
        if sign in "\t\n\r" or kind[0] == "Z":
            self[code] = " "
        elif kind in ("Cc", "Cf", "Co", "Cs") or sign == "\ufffd" or (kind == "Mn" and not self.accents):
            self[code] = ""
        elif kind[0] == "P" or sign in string.punctuation or any(a <= code <= b for a, b in IDEOGRAPHS):
            self[code] = f" {sign} "
        else:
            self[code] = sign
        return self[code]


class WordPieces(AnswersCalls):
    """A tokenizer: `vocabulary` has the id of every piece; `lower` forgets case and accents, as "uncased" models do.

    >>> pieces = ["[UNK]", "[CLS]", "low", "##er", "##est", "cafe", "!"]
    >>> tokens = WordPieces({piece: i for i, piece in enumerate(pieces)})
    >>> tokens.encode("Lower, lowest café!").tolist(), tokens.decode([2, 4, 5, 6]), tokens.id("[CLS]")
    ([2, 3, 0, 2, 4, 5, 6], 'lowest cafe !', 1)
    """

    def __init__(self, vocabulary: Mapping[str, int], *, lower: bool = True, unknown: str = "[UNK]") -> None:
        self.vocabulary, self.lower = dict(vocabulary), lower
        self.pieces = numbered(self.vocabulary)
        self.unknown = self.id(unknown)
        self._written = _Written(accents=not lower)
        self._known: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self.vocabulary)

    @public
    def id(self, name: str) -> int:
        """The id of a piece, or of a name such as [MASK]."""
        if name not in self.vocabulary:
            fix = did_you_mean(name, self.vocabulary) or f"pass a vocabulary that has {name!r:.60}"
            raise ArgumentError(f"the vocabulary has no piece {name!r:.60}", fix=fix)
        return self.vocabulary[name]

    @public
    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids of a text, without names before and behind it."""
        if self.lower:  # a sigma that ends a word is no other letter here
            text = unicodedata.normalize("NFD", text).replace("\u03a3", "\u03c3").lower()
        return np.array([i for word in text.translate(self._written).split() for i in self._ids(word)], np.int64)

    def _ids(self, word: str) -> list[int]:
        if word not in self._known:
            if len(self._known) == KEPT_WORDS:
                self._known.clear()
            self._known[word] = self._cut(word)
        return self._known[word]

    def _cut(self, word: str) -> list[int]:
        """The longest piece that the word begins with, then that of what is left."""
        ids, start = list[int](), 0
        while start < len(word) <= LONGEST:
            before = INSIDE if start else ""
            fitting = (end for end in range(len(word), start, -1) if before + word[start:end] in self.vocabulary)
            if (end := next(fitting, None)) is None:
                return [self.unknown]
            ids.append(self.vocabulary[before + word[start:end]])
            start = end
        return ids or [self.unknown]

    @public
    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The pieces of ids, those inside of a word without a blank before them."""
        try:
            return " ".join(self.pieces[index(i)] for i in ids).replace(f" {INSIDE}", "")
        except KeyError as error:
            fix = f"ids are 0 to {len(self) - 1}"
            raise DataError(f"id {error.args[0]} is not one of {len(self)} pieces", fix=fix) from None

    @classmethod
    @public
    def load(cls, folder: str | os.PathLike[str]) -> WordPieces:
        """Read `vocab.txt`, a piece a line, and `tokenizer_config.json` for `do_lower_case`; else `tokenizer.json`."""
        try:
            vocabulary, lower = (_of_lines if (Path(folder) / "vocab.txt").exists() else _of_json)(Path(folder))
            return cls(vocabulary, lower=lower)
        except HetuError as error:
            said = f"{str(folder)!r} has no vocabulary of word pieces: {error.message}"
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            said = f"no tokenizer in {str(folder)!r}: {error}"
        raise DataError(said, fix="copy vocab.txt or tokenizer.json of the model")

    @public
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `vocab.txt` and `tokenizer_config.json`."""
        pieces = "".join(f"{self.pieces[i]}\n" for i in range(len(self)))
        write_text(Path(folder) / "vocab.txt", pieces)
        write_text(Path(folder) / "tokenizer_config.json", json.dumps({"do_lower_case": self.lower}) + "\n")


def _of_lines(folder: Path) -> tuple[dict[str, int], bool]:
    pieces = (folder / "vocab.txt").read_text("utf-8").removesuffix("\n").split("\n")
    often, times = Counter(pieces).most_common(1)[0]
    if times > 1:
        raise DataError(f"it has {often!r:.60} {times} times")
    config = folder / "tokenizer_config.json"
    lower = json.loads(config.read_text("utf-8")).get("do_lower_case", True) if config.exists() else True
    return {piece: i for i, piece in enumerate(pieces)}, bool(lower)


def _of_json(folder: Path) -> tuple[dict[str, int], bool]:
    """As a later library writes it, with how it cuts."""
    told = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    if (kind := told["model"]["type"]) != "WordPiece":
        raise DataError(f"the pieces are of the kind {kind!r:.40}")
    return dict(told["model"]["vocab"]), bool(told["normalizer"]["lowercase"])
