"""Tables of vectors in fewer bytes: one layer, `Embedding`, and a file for each family of methods.

`method.py` says what a method is; `METHODS` names those that are here. H. Zhang et al., "Experimental Analysis of
Large-scale Learnable Vector Storage Compression", VLDB 2024, compare them. Left out: AutoDim and OptEmbed, which train
several tables beside each other.

>>> import hetu as ht
>>> sorted(METHODS)[:4]
['adaptive', 'alpt', 'autosrh', 'cafe']
"""

from ..answers import answer_calls as _answer_calls
from .hashed import Dedup, DeepHash, Hash, QuotientRemainder, Robe, TensorTrain
from .method import METHODS, Method, Vectors, Weights
from .method import CompressedEmbedding as Embedding
from .popular import Adaptive, Cafe, Mixed
from .pruned import AutoSrh, DeepLight, Pep, Pruned
from .quantized import Fixed, GranularCodes, Learned, ProductCodes

METHODS |= {
    "hash": Hash(), "quotient_remainder": QuotientRemainder(), "robe": Robe(), "dhe": DeepHash(),
    "tt_rec": TensorTrain(), "dedup": Dedup(), "int8": Fixed(8), "int16": Fixed(16), "alpt": Learned(),
    "dpq": ProductCodes(), "mgqe": GranularCodes(), "adaptive": Adaptive(), "mde": Mixed(), "deeplight": DeepLight(),
    "pep": Pep(), "autosrh": AutoSrh(), "cafe": Cafe(),
}  # fmt: skip

__all__ = [
    "METHODS", "Adaptive", "AutoSrh", "Cafe", "DeepHash", "DeepLight", "Dedup", "Embedding", "Fixed",
    "GranularCodes", "Hash", "Learned", "Method", "Mixed", "Weights", "Pep", "ProductCodes", "Pruned",
    "QuotientRemainder", "Robe", "Vectors", "TensorTrain",
]  # fmt: skip
_answer_calls(__name__)
