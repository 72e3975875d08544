"""Tables of vectors in fewer bytes: one layer, `Embedding`, and a file for each family of methods.

`method.py` says what a method is; `METHODS` names those that are here. H. Zhang et al., "Experimental Analysis of
Large-scale Learnable Vector Storage Compression", VLDB 2024, compare them. Left out: AutoDim and OptEmbed, which train
several tables beside each other.

>>> import hetu as ht
>>> [name for name in METHODS if ht.embed.Embedding(1000, 16, name, ratio=0.5).training_bytes < 1000 * 16 * 4]
['hash', 'quotient_remainder', 'robe', 'dhe', 'tt_rec', 'adaptive', 'mde', 'cafe']
"""

from ..answers import answer_calls as _answer_calls
from .hashed import dedup, dhe, quotient_remainder, remainder, robe, tt_rec
from .method import METHODS, Scheme, Vectors, Weights
from .method import CompressedEmbedding as Embedding
from .popular import adaptive, cafe, mde
from .pruned import autosrh, deeplight, pep
from .quantized import alpt, dpq, fixed

METHODS |= {
    "hash": remainder, "quotient_remainder": quotient_remainder, "robe": robe, "dhe": dhe, "tt_rec": tt_rec,
    "dedup": dedup, "int8": fixed, "int16": lambda table: fixed(table, bits=16), "alpt": alpt, "dpq": dpq,
    "mgqe": lambda table: dpq(table, head=0.1), "adaptive": adaptive, "mde": mde, "deeplight": deeplight, "pep": pep,
    "autosrh": autosrh, "cafe": cafe,
}  # fmt: skip

__all__ = [
    "METHODS", "Embedding", "Scheme", "Vectors", "Weights", "adaptive", "alpt", "autosrh", "cafe", "dedup", "deeplight",
    "dhe", "dpq", "fixed", "mde", "pep", "quotient_remainder", "remainder", "robe", "tt_rec",
]  # fmt: skip
_answer_calls(__name__)
