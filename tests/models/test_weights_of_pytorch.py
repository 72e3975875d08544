"""Modules of PyTorch as people write them, with our models: weights by rows of names in, and after training back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import hetu as ht

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
RNG = np.random.default_rng(0)
WORDS, LENGTH, WIDTH, HEADS, LAYERS = 50, 12, 32, 4, 3
PIXELS = RNG.standard_normal((4, 3, 32, 32)).astype("float32")


class Decoder(nn.Module):
    """One block of nanoGPT, whose queries, keys and values are one map."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(WIDTH, 3 * WIDTH), "c_proj": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Any) -> Any:
        heads = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in self.attn.c_attn(self.ln_1(x)).split(WIDTH, 2))
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attn.c_proj(seen.transpose(1, 2).flatten(2))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.ln_f = nn.ModuleList(Decoder() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.wte(ids) + self.wpe(torch.arange(LENGTH))
        return self.lm_head(self.ln_f(nn.Sequential(*self.h)(x)))


class Residual(nn.Module):
    """A basic block of torchvision."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(*shortcut) if stride > 1 else nn.Identity()

    def forward(self, x: Any) -> Any:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.fc = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.Linear(64, 10)
        for n, width in enumerate((8, 16, 32, 64), 1):
            first = Residual(max(8, width // 2), width, 2 if n > 1 else 1)
            setattr(self, f"layer{n}", nn.Sequential(first, Residual(width, width, 1)))
        for _ in range(3):  # so that statistics move
            self(torch.randn(8, 3, 32, 32) * 2 + 1)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.bn1(self.conv1(x)))
        for n in range(1, 5):
            x = getattr(self, f"layer{n}")(x)
        return self.fc(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.lstm(x)[0])


def both(kind: str) -> list[str]:
    return [rf"m/transformer_block_\1/attention/{part}/{kind}" for part in ("query", "key", "value")]


BLOCK = r"m/transformer_block_\1/"
GPT_ROWS = [
    (r"wte\.weight", "m/embedding_0/weight"),
    (r"wpe\.weight", "m/embedding_1/weight"),
    (r"h\.(\d+)\.ln_1\.weight", BLOCK + "attention_norm/scale"),
    (r"h\.(\d+)\.ln_1\.bias", BLOCK + "attention_norm/bias"),
    (r"h\.(\d+)\.attn\.c_attn\.weight", both("weight"), (1, 0)),
    (r"h\.(\d+)\.attn\.c_attn\.bias", both("bias")),
    (r"h\.(\d+)\.attn\.c_proj\.weight", BLOCK + "attention/output/weight", (1, 0)),
    (r"h\.(\d+)\.attn\.c_proj\.bias", BLOCK + "attention/output/bias"),
    (r"h\.(\d+)\.ln_2\.weight", BLOCK + "feed_forward_norm/scale"),
    (r"h\.(\d+)\.ln_2\.bias", BLOCK + "feed_forward_norm/bias"),
    (r"h\.(\d+)\.mlp\.c_fc\.weight", BLOCK + "up/weight", (1, 0)),
    (r"h\.(\d+)\.mlp\.c_proj\.weight", BLOCK + "down/weight", (1, 0)),
    (r"h\.(\d+)\.mlp\.c_fc\.bias", BLOCK + "up/bias"),
    (r"h\.(\d+)\.mlp\.c_proj\.bias", BLOCK + "down/bias"),
    (r"ln_f\.weight", "m/layer_norm/scale"),
    (r"ln_f\.bias", "m/layer_norm/bias"),
    (r"lm_head\.weight", "m/head/weight", (1, 0)),
]


def in_order(module: Any) -> list[Any]:
    """Rows that are written by a program, as both number what they have in the order of the computation."""
    names = [*module.state_dict()]
    kernels = [name for name in names if re.search(r"(conv\d|downsample\.0)\.weight", name)]
    norms = [name.removesuffix(".running_mean") for name in names if name.endswith(".running_mean")]
    rows: list[Any] = [(re.escape(name), f"m/conv2d_{n}/weight") for n, name in enumerate(kernels)]
    for n, norm in enumerate(norms):
        rows += [(re.escape(f"{norm}.weight"), f"m/batch_norm_{n}/scale")]
        rows += [(rf"{re.escape(norm)}\.(bias|running_\w+)", rf"m/batch_norm_{n}/\1")]
    return [*rows, (r"fc\.weight", "m/linear/weight", (1, 0)), (r"fc\.bias", "m/linear/bias")]


def summed(theirs: dict[str, Any]) -> dict[str, Any]:
    """An LSTM's weights are one matrix here, and it has one bias."""
    given = {name.removeprefix("lstm.").removesuffix("_l0"): a for name, a in theirs.items() if "lstm" in name}
    weight = np.concatenate([given["weight_ih"], given["weight_hh"]], axis=1)
    return theirs | {"weight": weight, "bias": given["bias_ih"] + given["bias_hh"]}


def lstm(x: ht.Node) -> ht.Node:
    return ht.nn.Linear(WIDTH, 3)(ht.nn.LSTM(8, WIDTH)(x)[0])


IDS, ROWS = RNG.integers(0, WORDS, (4, LENGTH)), RNG.standard_normal((4, 5, 8)).astype("float32")
LSTM_ROWS = [("weight", "m/lstm/weight", (1, 0)), ("bias", "m/lstm/bias")]
LSTM_ROWS += [(r"head\.weight", "m/linear/weight", (1, 0)), (r"head\.bias", "m/linear/bias")]
OURS: dict[str, Any] = {
    "gpt": lambda x: ht.models.text.gpt(x, WORDS, features=WIDTH, layers=LAYERS, heads=HEADS),
    "resnet": lambda x: ht.models.vision.resnet18(x, 10, width=8),
    "lstm": lstm,
}
THEIRS = {"gpt": (GPT, lambda _: GPT_ROWS, IDS), "resnet": (ResNet, in_order, PIXELS)}
THEIRS["lstm"] = (Recurrent, lambda _: LSTM_ROWS, ROWS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kept", ["file", "memory"])
@pytest.mark.parametrize("case", OURS)
def test_outputs_are_equal_on_the_way_in_and_back(case: str, kept: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind, written, given = THEIRS[case]
    module = kind().eval()
    rows, theirs = written(module), dict(module.state_dict())
    source: Any = summed(theirs) if case == "lstm" else theirs
    if kept == "file":
        save_file({n: np.ascontiguousarray(a) for n, a in source.items()}, source := tmp_path / "theirs.safetensors")
    x = ht.placeholder("x", (None, *given.shape[1:]), given.dtype.name)
    with ht.scope("m"):
        y = OURS[case](x)
    ex = ht.Executor({"train": [ht.optim.SGD(0.01).minimize(ht.mean(ht.square(y)))], "eval": [y]})

    def compare() -> np.ndarray:
        found = ex.run("eval", {x: given})[0]
        with torch.no_grad():
            np.testing.assert_allclose(found, module(torch.from_numpy(given)), rtol=1e-4, atol=1e-5)
        return found

    report = ht.load_weights(ex, source, names=rows)
    assert not report.missing and all(re.search("num_batches|lstm", name) for name in report.left)
    before = compare()
    ex.run("train", {x: given})
    tuned = report.state_dict(ex.state)
    if case == "lstm":
        weights, bias = np.split(tuned.pop("weight"), [8], axis=1), tuned.pop("bias")
        tuned |= {f"lstm.weight_{part}_l0": w for part, w in zip(("ih", "hh"), weights)}
        tuned |= {"lstm.bias_ih_l0": bias, "lstm.bias_hh_l0": np.zeros_like(bias)}
    missing, unknown = module.load_state_dict({n: torch.from_numpy(a) for n, a in tuned.items()}, strict=False)
    assert not unknown and all("num_batches" in name for name in missing)
    assert np.abs(compare() - before).max() > 1e-4
