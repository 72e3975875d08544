"""Layers: readable names, variables made from explicit sizes, and a call that adds nodes to the graph."""

from ..answers import answer_calls as _answer_calls
from .attention import DecoderBlock, MultiHeadAttention, TransformerBlock
from .containers import Sequential
from .conv import AvgPool2d, Conv2d, ConvTranspose2d, GlobalAvgPool2d, MaxPool2d
from .dense import Dropout, Flatten, Linear
from .embedding import DynamicEmbedding, Embedding, EmbeddingBag
from .experts import (
    BalancedGate,
    DenseToSparseGate,
    GroupGate,
    HashGate,
    MixtureOfExperts,
    PrototypeGate,
    TopKGate,
)
from .graph import GraphAttention, GraphConv, GraphSAGE
from .layer import Layer
from .named import NamedModel
from .normalization import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from .recurrent import GRU, LSTM, RNN, Bidirectional

__all__ = [
    "GRU", "LSTM", "RNN", "AvgPool2d", "BalancedGate", "BatchNorm", "Bidirectional", "Conv2d", "ConvTranspose2d",
    "DecoderBlock", "DenseToSparseGate", "Dropout", "DynamicEmbedding", "Embedding", "EmbeddingBag", "Flatten",
    "GlobalAvgPool2d", "GraphAttention", "GraphConv", "GraphSAGE", "GroupGate", "GroupNorm", "HashGate", "Layer",
    "LayerNorm", "Linear", "MaxPool2d", "MixtureOfExperts", "MultiHeadAttention", "NamedModel", "PrototypeGate",
    "RMSNorm", "Sequential", "TopKGate", "TransformerBlock",
]  # fmt: skip

_answer_calls(__name__)
