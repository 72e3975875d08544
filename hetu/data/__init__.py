"""Data sets and the loader that hands them out in batches: real files in, tuples of NumPy arrays out.

Nothing is downloaded: a data set is read from a folder of yours, from an installed package, or from the small files
that ship with hetu.
"""

from ..answers import answer_calls as _answer_calls
from .augment import Draws, Mixup, Normalize, RandomCrop, RandomFlip
from .bags import BagDataset, libsvm
from .bpe import BytePairs
from .dataset import ArrayDataset, Dataset, GraphData, TextData, masked_words, packed, sliding_windows, standardized
from .datasets import (
    adult,
    cifar10,
    cmudict,
    criteo,
    fashion_mnist,
    mnist,
    movielens,
    seattle_weather,
    shakespeare,
    text,
    wordnet_kg,
    wordnet_nouns,
)
from .graph_sets import citations, ogb, planetoid
from .graphs import Entries, adjacency
from .hashes import hashed
from .lengths import LengthLoader
from .loader import DataLoader
from .neighbors import Neighborhood, NeighborLoader
from .parts import GraphPart, partition
from .triples import TripleLoader
from .wordpieces import WordPieces

__all__ = [
    "ArrayDataset", "BagDataset", "BytePairs", "DataLoader", "Dataset", "Draws", "Entries", "GraphData",
    "GraphPart", "LengthLoader", "Mixup", "NeighborLoader", "Neighborhood", "Normalize", "RandomCrop", "RandomFlip",
    "TextData", "TripleLoader", "WordPieces", "adjacency", "adult", "cifar10", "citations", "cmudict", "criteo",
    "fashion_mnist", "hashed", "libsvm", "masked_words", "mnist", "movielens", "ogb", "packed", "partition",
    "planetoid", "seattle_weather", "shakespeare", "sliding_windows", "standardized", "text", "wordnet_kg",
    "wordnet_nouns",
]  # fmt: skip

_answer_calls(__name__)
