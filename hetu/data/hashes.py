"""Ids without a bound, of texts and numbers of a field, for tables that grow.

Two values have one id with a chance of n ** 2 / 2 ** 64 among n: one in 200,000 for ten million. Left out: hashes that
are kept secret, and dictionaries from ids back to values.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from ..core.errors import DTypeError
from ..ops.random import mixed_words, words_of
from ..ranges import unmasked

BITS = np.uint64((1 << 63) - 1)


def hashed(values: Any, field: str = "") -> np.ndarray:
    """Ids int64 from 0 to 2 ** 63 - 2 of texts, bytes or whole numbers, in their shape, the same in every process.

    `field` tells apart values of several fields, such as the number 7 of a city and of an hour. DTypeError for floats
    and objects.

    >>> import hetu as ht
    >>> ids = ht.data.hashed(["oak", "elm", "oak"], field="tree")
    >>> bool(ids[0] == ids[2]), ids[1].item()
    (True, 3973779682721954442)
    """
    array = unmasked(values, "values to hash")
    flat = array.reshape(-1) if array.size else np.empty(0, "S1")
    salt = np.uint64(int.from_bytes(_digest(field.encode(errors="surrogatepass")), "little"))
    if flat.dtype.kind in "iub":
        words = words_of(flat, salt)
    elif flat.dtype.kind in "US":
        found, places = np.unique(flat, return_inverse=True)
        coded = found if flat.dtype.kind == "S" else np.char.encode(found, "utf-8", "surrogatepass")
        words = mixed_words(np.frombuffer(b"".join(map(_digest, coded.tolist())), "<u8") + salt)[places]
    else:
        raise DTypeError(f"ids of values {array.dtype}", fix="pass texts, bytes or whole numbers: x.astype(str)")
    ids: np.ndarray = np.minimum(words & BITS, BITS - np.uint64(1)).astype("<i8")
    return ids.reshape(array.shape)


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=8).digest()
