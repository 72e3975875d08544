"""The rows of the CPU benchmark, by family: name, title, batch, what is done, and the sizes that are not the family's.

Several shapes and batch sizes of each family, so that no kernel wins by fitting one; a tuple of batches is an open one,
whose size changes with every step.
"""

from __future__ import annotations

from typing import Any

import networks
import workloads
from networks import Conv
from workloads import Family, Workload

OPEN = (64, 63, 17, 40, 33, 1, 58, 29)


def group(family: str, kind: Family, sizes: dict[str, Any], *rows: tuple[Any, ...]) -> list[Workload]:
    return [
        Workload(family, name, title, kind, batch, does, sizes | dict(*own)) for name, title, batch, does, *own in rows
    ]


def mlp(*sizes: int, **options: Any) -> dict[str, Any]:
    return {"sizes": sizes} | options


MNIST, WIDE, NORM = mlp(784, 256, 256, 10), mlp(1024, 2048, 2048, 10), mlp(784, 512, 512, 10, norm=True)
GELU = {"activation": "gelu"}
MLPS = group(
    "mlp",
    Family(networks.mlp, workloads.vectors, rate=0.05),
    {"activation": "relu", "norm": False},
    ("tiny_mlp", "MLP 32-32-32-10", 16, "SGD", mlp(32, 32, 32, 10)),
    ("mlp_sgd", "MLP 784-256-256-10", 128, "SGD", MNIST),
    ("mlp_adam", "MLP 784-256-256-10", 128, "Adam", MNIST),
    ("mlp_small", "MLP 64-128-128-10", 32, "Adam", mlp(64, 128, 128, 10)),
    ("mlp_wide", "MLP 1024-2048-2048-10", 64, "SGD", WIDE),
    ("mlp_wide_adam", "MLP 1024-2048-2048-10", 256, "Adam", WIDE),
    ("mlp_deep", "MLP of 16 layers of 64", 32, "SGD", mlp(*[64] * 16, 10)),
    ("mlp_norm", "MLP 784-512-512-10, batch norm", 128, "SGD", NORM),
    ("mlp_norm_gelu", "MLP 784-512-512-10, batch norm, gelu", 128, "Adam", NORM | GELU),
    ("mlp_gelu", "MLP 256-1024-256-10, gelu", 256, "SGD", mlp(256, 1024, 256, 10) | GELU),
    ("mlp_open", "MLP 784-256-256-10", OPEN, "SGD", MNIST),
    ("mlp_one", "MLP 784-256-256-10", 1, "SGD", MNIST),
    ("mlp_infer", "MLP 784-256-256-10", 128, "inference", MNIST),
    ("mlp_one_infer", "MLP 784-256-256-10", 1, "inference", MNIST),
    ("mlp_norm_infer", "MLP 784-512-512-10, batch norm, gelu", 64, "inference", NORM | GELU),
)  # fmt: skip

TINY = group(
    "tiny graphs",
    Family(networks.chain, workloads.vectors, rate=0.05),
    {"sizes": (8, 4), "depth": 20},
    ("linear_loop", "a linear layer 8-4", 4, "SGD", {"depth": 0}),
    ("linear_loop_infer", "a linear layer 8-4", 1, "inference", {"depth": 0}),
    ("chain_loop", "60 operators on 8 numbers, a linear layer", 4, "SGD"),
    ("chain_loop_infer", "60 operators on 8 numbers, a linear layer", 1, "inference"),
)


def convs(*convs: Conv, head: tuple[int, ...], channels: int = 3, side: int = 32) -> dict[str, Any]:
    return {"convs": convs, "head": head, "channels": channels, "side": side, "flat": False}


LENET = convs(Conv(6, 5, pool=2), Conv(16, 5, padding=0, pool=2), head=(400, 120, 84, 10), channels=1, side=28)
LENET["flat"] = True
VGG = convs(*(Conv(width, 3, pool=pool) for width, pool in ((64, 1), (64, 2), (128, 1), (128, 2), (256, 1), (256, 2))),
            head=(256, 10))  # fmt: skip
FIVES = convs(*(Conv(width, 5, stride=2, norm="batch") for width in (32, 64, 128)), head=(128, 10), side=64)
SEVENS = convs(Conv(64, 7, stride=2, norm="batch", pool=2), Conv(64, 7, stride=2), head=(64, 10), side=112)
DILATED = convs(Conv(32, 3), *(Conv(32, 3, dilation=d) for d in (2, 4, 8)), head=(32, 10))
GROUPED = convs(Conv(64, 3), *(Conv(64, 3, groups=8, norm="batch") for _ in range(3)), head=(64, 10))
GROUP_NORM = convs(*(Conv(64, 3, norm="group") for _ in range(3)), head=(64, 10))
DEPTHWISE = convs(Conv(64, 3), *(Conv(64, size, groups=0) for size in (3, 5, 3)), head=(64, 10))
CNNS = group(
    "cnn",
    Family(networks.cnn, workloads.images),
    {},
    ("lenet", "LeNet 1x28x28", 128, "SGD", LENET),
    ("lenet_adam", "LeNet 1x28x28", 16, "Adam", LENET),
    ("lenet_open", "LeNet 1x28x28", OPEN, "SGD", LENET),
    ("lenet_one", "LeNet 1x28x28", 1, "SGD", LENET),
    ("lenet_infer", "LeNet 1x28x28", 128, "inference", LENET),
    ("lenet_one_infer", "LeNet 1x28x28", 1, "inference", LENET),
    ("vgg", "VGG of 6 convolutions 3x32x32", 8, "SGD", VGG),
    ("vgg_infer", "VGG of 6 convolutions 3x32x32", 16, "inference", VGG),
    ("vgg_one_infer", "VGG of 6 convolutions 3x32x32", 1, "inference", VGG),
    ("conv5", "5x5 strided 3x64x64", 16, "SGD", FIVES),
    ("conv5_infer", "5x5 strided 3x64x64", 16, "inference", FIVES),
    ("conv7", "7x7 strided 3x112x112", 4, "SGD", SEVENS),
    ("conv7_infer", "7x7 strided 3x112x112", 4, "inference", SEVENS),
    ("dilated", "dilated 3x3 3x32x32", 16, "SGD", DILATED),
    ("grouped", "grouped 3x3 3x32x32", 16, "SGD", GROUPED),
    ("group_norm", "3x3 with group norm 3x32x32", 8, "SGD", GROUP_NORM),
    ("depthwise", "depthwise 3x3 and 5x5 3x32x32", 16, "SGD", DEPTHWISE),
    ("depthwise_infer", "depthwise 3x3 and 5x5 3x32x32", 16, "inference", DEPTHWISE),
)

RESNET = {"widths": (64, 128, 256, 512), "depth": 2}
BOTTLENECK = {"block": "bottleneck", "widths": (32, 64, 128), "depth": 2}
NARROW = {"widths": (16, 32, 64), "depth": 2}
MOBILENET = {"block": "inverted", "groups": 4, "widths": (16, 24, 48, 96), "depth": 2}
RESNETS = group(
    "cnn",
    Family(networks.resnet, workloads.images, rate=1e-4),
    {"channels": 3, "side": 32, "block": "basic", "groups": 1},
    ("resnet", "ResNet-18 3x32x32", 32, "SGD", RESNET),
    ("resnet_64", "ResNet-18 3x64x64", 1, "SGD", RESNET | {"side": 64}),
    ("resnet_narrow", "ResNet of 14 convolutions, 16 to 64 wide, 3x32x32", 16, "SGD", NARROW),
    ("resnet_infer", "ResNet-18 3x32x32", 4, "inference", RESNET),
    ("resnet_one_infer", "ResNet-18 3x32x32", 1, "inference", RESNET),
    ("bottleneck", "ResNet of bottlenecks 3x32x32", 8, "SGD", BOTTLENECK),
    ("bottleneck_infer", "ResNet of bottlenecks 3x32x32", 8, "inference", BOTTLENECK),
    ("resnext", "ResNet of grouped bottlenecks 3x32x32", 8, "SGD", BOTTLENECK | {"groups": 8}),
    ("mobilenet", "MobileNet 3x32x32", 8, "SGD", MOBILENET),
    ("mobilenet_infer", "MobileNet 3x32x32", 8, "inference", MOBILENET),
    ("mobilenet_one_infer", "MobileNet 3x32x32", 1, "inference", MOBILENET),
)  # fmt: skip

DENSENETS = group(
    "cnn",
    Family(networks.densenet, workloads.images),
    {"channels": 3, "side": 32, "width": 32, "growth": 16, "depth": 6},
    ("densenet", "DenseNet of 7 convolutions 3x32x32", 16, "SGD"),
    ("densenet_infer", "DenseNet of 7 convolutions 3x32x32", 16, "inference"),
)
UNETS = group(
    "cnn",
    Family(networks.unet, workloads.pixels, "binary_cross_entropy"),
    {"channels": 3, "side": 64, "widths": (16, 32, 64)},
    ("unet", "U-Net 3x64x64", 4, "SGD"),
    ("unet_infer", "U-Net 3x64x64", 4, "inference"),
    ("unet_one_infer", "U-Net 3x64x64", 1, "inference"),
)
GENERATORS = group(
    "cnn",
    Family(networks.generator, workloads.noise, "squared_error"),
    {"sizes": (64,), "widths": (128, 64, 32, 3)},
    ("generator", "4x4 transposed convolutions to 3x32x32", 16, "Adam"),
)

GPT = {"vocabulary": 1000, "depth": 4, "length": 128}
GPTS = group(
    "transformer",
    Family(networks.gpt, workloads.next_tokens),
    GPT,
    ("gpt", "GPT d128, 4 layers, 128 tokens", 16, "Adam", {"d": 128}),
    ("gpt_256", "GPT d256, 4 layers, 128 tokens", 16, "Adam", {"d": 256}),
    ("gpt_16", "GPT d128, 4 layers, 16 tokens", 32, "Adam", {"d": 128, "length": 16}),
    ("gpt_wide", "GPT d512, 2 layers, 64 tokens", 4, "SGD", {"d": 512, "depth": 2, "length": 64}),
    ("gpt_512", "GPT d128, 2 layers, 512 tokens", 2, "SGD", {"d": 128, "depth": 2, "length": 512}),
    ("gpt_1024", "GPT d128, 2 layers, 1024 tokens", 1, "SGD", {"d": 128, "depth": 2, "length": 1024}),
    ("gpt_2048", "GPT d128, 1 layer, 2048 tokens", 1, "SGD", {"d": 128, "depth": 1, "length": 2048}),
    ("gpt_words", "GPT d64, 1 layer, 64 tokens of 20,000", 4, "Adam",
     {"d": 64, "depth": 1, "length": 64, "vocabulary": 20_000}),
    ("gpt_infer", "GPT d128, 4 layers, 128 tokens", 8, "inference", {"d": 128}),
    ("gpt_one_infer", "GPT d256, 4 layers, 128 tokens", 1, "inference", {"d": 256}),
)  # fmt: skip

BERT = {"vocabulary": 1000, "depth": 4, "length": 128, "classes": 4, "d": 128}
BERTS = group(
    "transformer",
    Family(networks.bert, workloads.texts),
    BERT,
    ("bert", "BERT d128, 4 layers, 128 tokens", 8, "Adam"),
    ("bert_open", "BERT d128, 2 layers, 32 tokens", (16, 15, 7, 1, 12, 3), "SGD", {"depth": 2, "length": 32}),
    ("bert_infer", "BERT d128, 4 layers, 128 tokens", 8, "inference"),
    ("bert_one_infer", "BERT d256, 4 layers, 64 tokens", 1, "inference", {"d": 256, "length": 64}),
)
MASKED_BERTS = group(
    "transformer",
    Family(networks.bert, workloads.padded_texts),
    BERT,
    ("bert_mask", "BERT d128, 4 layers, 64 padded tokens", 16, "Adam", {"length": 64}),
    ("bert_mask_512", "BERT d128, 2 layers, 512 padded tokens", 2, "SGD", {"depth": 2, "length": 512}),
    ("bert_mask_infer", "BERT d256, 4 layers, 128 padded tokens", 4, "inference", {"d": 256}),
)
VITS = group(
    "transformer",
    Family(networks.vit, workloads.images),
    {"channels": 3, "side": 32, "patch": 4, "depth": 4, "d": 128, "classes": 10},
    ("vit", "ViT d128, 4 layers, 3x32x32 in patches of 4x4", 16, "Adam"),
    ("vit_one_infer", "ViT d128, 4 layers, 3x32x32 in patches of 4x4", 1, "inference"),
)
WIDE_ROWS = group(
    "transformer",
    Family(networks.wide_rows, workloads.vectors),
    {"sizes": (4096,), "depth": 3},
    ("wide_rows", "3 layer norms and softmaxes of 4096", 256, "SGD"),
    ("wide_rows_infer", "3 layer norms and softmaxes of 4096", 256, "inference"),
    ("narrow_rows", "3 layer norms and softmaxes of 256", 2048, "SGD", {"sizes": (256,)}),
)

RECURRENT = group(
    "recurrent",
    Family(networks.recurrent, workloads.sequences, rate=0.05),
    {"cell": "lstm", "inputs": 28, "hidden": 128, "length": 28, "depth": 1, "both": False, "every": False,
     "vocabulary": 0, "classes": 10},
    ("lstm", "LSTM 128, 28 steps of 28", 128, "SGD"),
    ("lstm_small", "LSTM 32, 20 steps of 8", 16, "Adam", {"hidden": 32, "inputs": 8, "length": 20}),
    ("lstm_large", "LSTM 512, 16 steps of 256", 32, "SGD", {"hidden": 512, "inputs": 256, "length": 16}),
    ("lstm_both", "LSTM 128 both ways, 28 steps of 28", 64, "SGD", {"both": True}),
    ("lstm_stacked", "3 LSTMs 64, 28 steps of 28", 32, "Adam", {"depth": 3, "hidden": 64}),
    ("lstm_words", "LSTM 128 with a head at each of 32 tokens", 32, "Adam",
     {"every": True, "vocabulary": 1000, "classes": 1000, "inputs": 64, "length": 32}),
    ("lstm_open", "LSTM 128, 28 steps of 28", OPEN, "SGD"),
    ("lstm_one", "LSTM 128, 28 steps of 28", 1, "SGD"),
    ("lstm_infer", "LSTM 128, 28 steps of 28", 128, "inference"),
    ("lstm_one_infer", "LSTM 128, 28 steps of 28", 1, "inference"),
    ("gru", "GRU 128, 28 steps of 28", 128, "SGD", {"cell": "gru"}),
    ("gru_small", "GRU 32, 20 steps of 8", 16, "Adam", {"cell": "gru", "hidden": 32, "inputs": 8, "length": 20}),
    ("gru_both", "2 GRUs 64 both ways, 20 steps of 28", 32, "SGD",
     {"cell": "gru", "both": True, "depth": 2, "hidden": 64, "length": 20}),
    ("gru_infer", "GRU 128, 28 steps of 28", 64, "inference", {"cell": "gru"}),
)  # fmt: skip

WIDE_DEEPS = group(
    "click",
    Family(networks.wide_deep, workloads.clicks, "binary_cross_entropy", 0.05),
    {"rows": 1_000_000, "fields": 26, "d": 16, "numbers": 13, "sizes": (256, 256, 256)},
    ("wide_deep", "Wide&Deep, 26 fields x 16, 1,000,000 rows", 1024, "SGD"),
    ("wide_deep_128", "Wide&Deep, 26 fields x 16, 100,000 rows", 128, "SGD", {"rows": 100_000}),
    ("wide_deep_adam", "Wide&Deep, 26 fields x 16, 26,000 rows", 256, "Adam", {"rows": 26_000}),
    ("wide_deep_infer", "Wide&Deep, 26 fields x 16, 100,000 rows", 512, "inference", {"rows": 100_000}),
)
DEEPFMS = group(
    "click",
    Family(networks.deepfm, workloads.clicks, "binary_cross_entropy", 0.05),
    {"rows": 100_000, "fields": 26, "d": 16, "numbers": 0, "sizes": (128, 128)},
    ("deepfm", "DeepFM, 26 fields x 16, 100,000 rows", 512, "SGD"),
    ("deepfm_infer", "DeepFM, 26 fields x 16, 100,000 rows", 512, "inference"),
)
BAGS = group(
    "click",
    Family(networks.bags, workloads.words, rate=0.05),
    {"rows": 100_000, "words": 50, "d": 64, "sizes": (64,), "classes": 20},
    ("bags", "bags of 50 words x 64, 100,000 rows", 256, "SGD"),
    ("bags_long", "bags of 200 words x 32, 20,000 rows", 64, "SGD", {"rows": 20_000, "words": 200, "d": 32}),
    ("bags_infer", "bags of 50 words x 64, 100,000 rows", 256, "inference"),
)

GCNS = group(
    "graph",
    Family(networks.gcn, workloads.nodes, fixed=workloads.graph),
    {"sizes": (128, 64, 16), "nodes": 20_000, "edges": 100_000},
    ("gcn", "GCN 128-64-16, 20000 nodes, 219860 entries", 1, "Adam"),
    ("gcn_small", "GCN 256-16-7, 2700 nodes", 1, "Adam", {"sizes": (256, 16, 7), "nodes": 2700, "edges": 5400}),
    ("gcn_infer", "GCN 128-64-16, 20000 nodes", 1, "inference"),
)

WORKLOADS: dict[str, Workload] = {
    row.name: row
    for rows in (MLPS, TINY, CNNS, RESNETS, DENSENETS, UNETS, GENERATORS, GPTS, BERTS, MASKED_BERTS, VITS, WIDE_ROWS,
                 RECURRENT, WIDE_DEEPS, DEEPFMS, BAGS, GCNS)
    for row in rows
}  # fmt: skip
FAMILIES = list(dict.fromkeys(row.family for row in WORKLOADS.values()))
