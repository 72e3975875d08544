"""Byte pairs: words cut into the pieces that a vocabulary of merged bytes has, as GPT-2 does; no text is unknown.

R. Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", 2016, on bytes as in A. Radford et
al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.2. `vocab.json` and `merges.txt` are read
and written as GPT-2 has them. Left out: names like `<|endoftext|>` are ids to add, and in a text they are letters.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import index
from pathlib import Path
from typing import SupportsIndex, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..answers import AnswersCalls
from ..core.errors import ArgumentError, DataError, public
from ..files import write_text

IdPair = tuple[int, int]
PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that stand for themselves in a file
ORDER = [*PRINTED, *(b for b in range(256) if b not in {*PRINTED})]  # of the ids of single bytes
SIGNS = dict(zip(ORDER, map(chr, [*PRINTED, *range(256, 512 - len(PRINTED))])))  # what a file writes for a byte
BYTES = {sign: byte for byte, sign in SIGNS.items()}
SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
KEPT_WORDS = 1 << 16  # of which the pieces are remembered


@lru_cache(maxsize=1)
def words() -> re.Pattern[str]:
    """How GPT-2 cuts a text into words, each with the blank before it: merges do not cross them."""
    numbers = "".join(c for c in map(chr, range(0x110000)) if unicodedata.category(c) in ("Nl", "No"))
    letter, number, other = rf"[^\W\d_{numbers}]", rf"[\d{numbers}]", rf"(?:[^\w{SPACE}]|_)"
    blanks = rf"[{SPACE}]+(?![^{SPACE}])|[{SPACE}]+"
    return re.compile(rf"'(?:s|t|re|ve|m|ll|d)| ?{letter}+| ?{number}+| ?{other}+|{blanks}")


class BytePairs(AnswersCalls):
    """A tokenizer: `vocabulary` has the id of every piece of bytes, `ranks` the order in which pairs of ids merge.

    >>> tokens = BytePairs.train("low lower lowest " * 9, 262, names=["[MASK]"])
    >>> ids = tokens.encode("lowest of all")
    >>> [tokens.pieces[i].decode() for i in ids], tokens.decode(ids), tokens.id("[MASK]"), len(tokens)
    (['low', 'e', 'st', ' ', 'o', 'f', ' ', 'a', 'l', 'l'], 'lowest of all', 262, 263)
    """

    def __init__(self, vocabulary: Mapping[bytes, int], merges: Sequence[tuple[bytes, bytes]]) -> None:
        self.vocabulary, self.merges = dict(vocabulary), list(merges)
        self.pieces = numbered(self.vocabulary)
        needed = [*(bytes([b]) for b in range(256)), *(piece for a, b in self.merges for piece in (a, b, a + b))]
        if missing := [piece for piece in needed if piece not in self.vocabulary]:
            fix = "use vocab.json and merges.txt of one tokenizer"
            raise DataError(f"the vocabulary lacks {missing[0]!r:.60}, one of {len(missing)}", fix=fix)
        id_of = self.vocabulary
        self.ranks = {(id_of[a], id_of[b]): (n, id_of[a + b]) for n, (a, b) in enumerate(self.merges)}
        self._bytes = np.array([id_of[bytes([b])] for b in range(256)])
        self._known: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self.vocabulary)

    @public
    def id(self, name: str) -> int:
        """The id of a piece, or of a name that was added."""
        if (piece := name.encode()) not in self.vocabulary:
            raise ArgumentError(f"the vocabulary has no piece {name!r:.60}", fix="train it with names=[...]")
        return self.vocabulary[piece]

    # -- text and ids --------------------------------------------------------------------------------------------

    @public
    def encode(self, text: str | bytes) -> NDArray[np.int64]:
        """The ids of a text, or of any bytes."""
        return np.array([i for word in cut(text) for i in self._ids(word)], np.int64)

    def _ids(self, word: str) -> list[int]:
        if word not in self._known:
            if len(self._known) == KEPT_WORDS:
                self._known.clear()
            self._known[word] = self._merged(self._bytes[list(raw(word))].tolist())
        return self._known[word]

    def _merged(self, ids: list[int]) -> list[int]:
        """Merge the pair of the lowest rank, wherever it stands, until there is none."""
        while len(ids) > 1:
            best = min(pairwise(ids), key=lambda pair: self.ranks.get(pair, (len(self.ranks), 0)))
            if best not in self.ranks:
                break
            ids = replaced(ids, best, self.ranks[best][1])
        return ids

    @public
    def decode_bytes(self, ids: Iterable[SupportsIndex]) -> bytes:
        """The bytes of ids, the inverse of `encode`."""
        try:
            return b"".join(self.pieces[index(i)] for i in ids)
        except KeyError as error:
            fix = f"ids are 0 to {len(self) - 1}"
            raise DataError(f"id {error.args[0]} is not one of {len(self)} pieces", fix=fix) from None

    @public
    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The text of ids; a character that was cut becomes the sign for what is not known."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    # -- to make one ---------------------------------------------------------------------------------------------

    @classmethod
    @public
    def train(cls, text: str | bytes, size: int, *, names: Sequence[str] = ()) -> BytePairs:
        """A vocabulary of `size` pieces: bytes, then again and again the pair that the text has most often, as one.

        Of pairs that are as often, that of the lower ids. It ends early where no pair stands twice. `names` get the
        ids behind. Sennrich et al., 2016, algorithm 1.
        """
        if size < 256:
            raise ArgumentError(f"size={size}, wanted 256 at least", fix="every byte is a piece")
        pieces = [bytes([b]) for b in ORDER]
        merges = [*_most_frequent_pairs(Counter(cut(text)), size)]
        for a, b in merges:
            pieces.append(pieces[a] + pieces[b])
        pairs = [(pieces[a], pieces[b]) for a, b in merges]
        return cls({piece: i for i, piece in enumerate([*pieces, *(name.encode() for name in names)])}, pairs)

    @classmethod
    @public
    def load(cls, folder: str | os.PathLike[str]) -> BytePairs:
        """Read `vocab.json` and `merges.txt`; DataError for what is missing, damaged, or not of one tokenizer."""
        try:
            found = json.loads((Path(folder) / "vocab.json").read_text("utf-8"))
            lines = (Path(folder) / "merges.txt").read_text("utf-8").split("\n")
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"no tokenizer in {str(folder)!r}: {error}", fix="copy vocab.json and merges.txt") from None
        if not isinstance(found, dict):
            raise DataError(f"vocab.json holds a {type(found).__name__}, wanted ids by pieces", fix="copy it again")
        start = 1 if lines[0].startswith("#version") else 0
        pairs = [tuple(map(of_signs, line.split(" "))) for line in lines[start:] if line]
        if odd := [n for n, pair in enumerate(pairs, start + 1) if len(pair) != 2]:
            raise DataError(f"line {odd[0]} of merges.txt is no pair of pieces", fix="copy it again")
        return cls({of_signs(piece): i for piece, i in found.items()}, [(a, b) for a, b in pairs])

    @public
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `vocab.json` and `merges.txt`."""
        vocabulary = {as_signs(piece): i for piece, i in sorted(self.vocabulary.items(), key=lambda item: item[1])}
        lines = ["#version: 0.2", *(f"{as_signs(a)} {as_signs(b)}" for a, b in self.merges)]
        write_text(Path(folder) / "vocab.json", json.dumps(vocabulary, ensure_ascii=False))
        write_text(Path(folder) / "merges.txt", "\n".join(lines) + "\n")


P = TypeVar("P")


def numbered(vocabulary: Mapping[P, int]) -> dict[int, P]:
    """The pieces by their ids, which must count them; DataError else."""
    pieces, fix = {i: piece for piece, i in vocabulary.items()}, "number the pieces from 0, each once"
    if strange := [i for i in pieces if not isinstance(i, int) or not 0 <= i < len(vocabulary)]:
        raise DataError(f"a vocabulary of {len(vocabulary)} pieces has the id {strange[0]!r:.40}", fix=fix)
    if len(pieces) < len(vocabulary):
        raise DataError("two pieces of the vocabulary have one id", fix=fix)
    return pieces


def cut(text: str | bytes) -> list[str]:
    """The words of a text; a byte that is no UTF-8 is one half of a surrogate on the way."""
    return words().findall(text.decode("utf-8", "surrogateescape") if isinstance(text, bytes) else text)


def raw(word: str) -> bytes:
    try:
        return word.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise DataError(f"{word!r:.60} has half of a surrogate pair", fix="pass the bytes of the text") from None


def as_signs(piece: bytes) -> str:
    return "".join(SIGNS[byte] for byte in piece)


def of_signs(signs: str) -> bytes:
    """A piece as it stands in a file; one with other signs, such as the name of an id, stands for itself."""
    return bytes(BYTES[sign] for sign in signs) if {*signs} <= BYTES.keys() else signs.encode()


def replaced(ids: list[int], pair: IdPair, merged: int) -> list[int]:
    """`ids` with every `pair`, from the left, as one."""
    out, i = list[int](), 0
    while i < len(ids):
        both = i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair
        out.append(merged if both else ids[i])
        i += 1 + both
    return out


def _most_frequent_pairs(counts: Mapping[str, int], size: int) -> Iterator[IdPair]:
    """The pairs to merge, in order. Only the words that have the last one are counted again."""
    place = {byte: i for i, byte in enumerate(ORDER)}
    rows, times = [[place[b] for b in raw(word)] for word in counts], [*counts.values()]
    total, where = Counter[IdPair](), defaultdict[IdPair, set[int]](set)

    def count(n: int, sign: int) -> Iterator[IdPair]:
        for pair in pairwise(rows[n]):
            total[pair] += sign * times[n]
            where[pair].add(n)
            yield pair

    for n in range(len(rows)):
        for _ in count(n, 1):
            pass
    heap = [(-often, pair) for pair, often in total.items()]
    heapq.heapify(heap)
    made = len(ORDER)
    while heap and made < size:
        often, pair = heapq.heappop(heap)
        if -often != total[pair] or total[pair] < 2:
            continue  # it was counted again since
        yield pair
        changed = set[IdPair]()
        for n in where.pop(pair):
            changed |= {*count(n, -1)}
            rows[n] = replaced(rows[n], pair, made)
            changed |= {*count(n, 1)}
        for other in changed:
            heapq.heappush(heap, (-total[other], other))
        made += 1
