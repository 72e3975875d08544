"""Ids without a bound, of texts and numbers of a field, for tables that grow.

Two values have one id with a chance of n ** 2 / 2 ** 64 among n: one in 200,000 for ten million. Left out: hashes that
are kept secret, and dictionaries from ids back to values.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from ..core.errors import DTypeError
from ..ops.random import GOLDEN, mixed_words

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
    array = np.asarray(values)
    salt = np.uint64(int.from_bytes(blake2b(field.encode(), digest_size=8).digest(), "little"))
    if array.dtype.kind in "iub":
        words = mixed_words(array.astype("<u8") * GOLDEN + salt)
    elif array.dtype.kind in "US":
        found, places = np.unique(array, return_inverse=True)
        coded = [text.encode() if isinstance(text, str) else text for text in found.tolist()]
        digests = b"".join(blake2b(text, digest_size=8).digest() for text in coded)
        words = mixed_words(np.frombuffer(digests, "<u8") + salt)[places].reshape(array.shape)
    else:
        raise DTypeError(f"ids of values {array.dtype}", fix="pass texts, bytes or whole numbers: x.astype(str)")
    ids: np.ndarray = np.minimum(words & BITS, BITS - np.uint64(1)).astype("<i8")
    return ids
