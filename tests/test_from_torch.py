"""Modules of PyTorch as graphs: values, gradients and what training keeps are PyTorch's own; what lacks is named."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

import hetu as ht

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    def __init__(self, w=4):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, w, 7, 2, 3, bias=False), nn.BatchNorm2d(w), nn.ReLU(inplace=True))
        self.maxpool, self.avgpool = nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d((1, 1))
        for k in range(4):
            a, b = w * 2 ** max(k - 1, 0), w * 2**k
            setattr(self, f"layer{k + 1}", nn.Sequential(Residual(a, b, 1 + (k > 0)), Residual(b, b)))
        self.fc = nn.Linear(8 * w, 10)

    def forward(self, x):
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.maxpool(self.stem(x))))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class ViT(nn.Module):
    def __init__(self, d=16, patch=4, size=16):
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, d, patch, patch), nn.Parameter(torch.randn(1, 1, d))
        self.pos = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, d))
        layer = nn.TransformerEncoderLayer(d, 4, 32, 0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(self.encoder(x))[:, 0])


class GPT(nn.Module):
    """With tied weights, and attention by hand or PyTorch's own."""

    def __init__(self, flash, words=20, d=16, heads=4, most=12):
        super().__init__()
        self.flash, self.heads = flash, heads
        self.wte, self.wpe, self.head = nn.Embedding(words, d), nn.Embedding(most, d), nn.Linear(d, words, bias=False)
        self.wte.weight = self.head.weight
        self.ln1, self.ln2, self.qkv, self.proj = nn.LayerNorm(d), nn.RMSNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU("tanh"), nn.Linear(4 * d, d), nn.Dropout(0.0))
        self.register_buffer("seen", torch.tril(torch.ones(most, most)).view(1, 1, most, most))

    def attend(self, x):
        b, t, c = x.size()
        q, k, v = self.qkv(x).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            y = F.softmax(scores.masked_fill(self.seen[:, :, :t, :t] == 0, float("-inf")), dim=-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))

    def forward(self, ids, targets=None):
        x = self.wte(ids) + self.wpe(torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device))
        x = x + self.attend(self.ln1(x))
        logits = self.head(x + self.mlp(self.ln2(x)))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Classifier(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.table = nn.Embedding(30, 8, padding_idx=0)
        self.rnn = getattr(nn, kind)(8, 6, num_layers=2, bidirectional=True, **options)
        self.fc = nn.Linear(12, 3)

    def forward(self, ids):
        outputs, last = self.rnn(self.table(ids))
        last = last[0] if isinstance(last, tuple) else last
        return {"logits": self.fc(torch.cat([last[-2], last[-1]], 1)), "mean": outputs.mean(1)}


class Of(nn.Module):
    """A module of one function, and of buffers and modules that it reads."""

    def __init__(self, function, *inner, **buffers):
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(inner)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *given):
        return self.function(self, *given)


class Of1(Of):
    def forward(self, x):
        return self.function(self, x)


class Of2(Of):
    def forward(self, x, y):
        return self.function(self, x, y)


def images(*shape):
    return lambda: torch.randn(*shape)


def ids(*shape):
    return lambda: torch.randint(0, 20, shape)


GENERATOR = [(16, 8, 4, 1, 0), (8, 4, 4, 2, 1), (4, 3, 4, 2, 1)]
MODULES = {
    "resnet": (ResNet18, images(3, 3, 64, 64)),
    "vit": (ViT, images(3, 3, 16, 16)),
    "gpt": (lambda: GPT(False), ids(3, 9)),
    "gpt, flash, loss": (lambda: GPT(True), ids(3, 9), ids(3, 9)),
    "lstm": (lambda: Classifier("LSTM", batch_first=True), ids(4, 7)),
    "gru": (lambda: Classifier("GRU", batch_first=True), ids(4, 7)),
    "lstm, time first, no bias": (lambda: Classifier("LSTM", bias=False), ids(4, 7)),
    "dcgan generator": (
        lambda: nn.Sequential(
            *(
                part
                for i, o, k, s, p in GENERATOR
                for part in (nn.ConvTranspose2d(i, o, k, s, p, bias=False), nn.BatchNorm2d(o), nn.ReLU(True))
            ),
            nn.Tanh(),
        ),
        images(3, 16, 1, 1),
    ),
    "discriminator": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.GroupNorm(4, 8), nn.SiLU(),
            nn.Upsample(scale_factor=2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(512, 1), nn.Sigmoid(),
        ),
        images(3, 3, 16, 16),
    ),
    "one axis": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 6, 3, padding="same"), nn.BatchNorm1d(6), nn.ReLU6(), nn.MaxPool1d(2),
            nn.Conv1d(6, 4, 3, stride=2, padding=1, groups=2), nn.AdaptiveMaxPool1d(1),
        ),
        images(4, 3, 12),
    ),
    "attention": (lambda: nn.MultiheadAttention(16, 4, batch_first=True), *[images(3, 5, 16)] * 3),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.0), images(5, 3, 16)),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True), *[images(3, 5, 16)] * 2),
    "masks": (
        lambda: Of2(
            lambda m, x, y: (
                m.inner[0](x, mask=m.later, src_key_padding_mask=y[..., 0] > 1),
                m.inner[1](x, y, y, attn_mask=m.later, key_padding_mask=y[..., 0] > 1, average_attn_weights=False),
            ),
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 1),
            nn.MultiheadAttention(16, 4, batch_first=True, kdim=16, vdim=16),
            later=torch.triu(torch.ones(5, 5, dtype=torch.bool), 1),
        ),
        *[images(3, 5, 16)] * 2,
    ),
    "first states": (
        lambda: Of2(
            lambda m, x, h: (m.inner[0](x, (h, h * 2)), m.inner[1](x, h)),
            nn.LSTM(4, 6), nn.GRU(4, 6),
        ),
        images(5, 3, 4), images(1, 3, 6),
    ),
    "bags": (lambda: nn.EmbeddingBag(20, 4, mode="sum"), ids(3, 5)),
    "losses": (
        lambda: Of2(
            lambda m, x, t: (
                F.cross_entropy(m.inner[0](x), t[:, 0], ignore_index=2, label_smoothing=0.1),
                F.nll_loss(F.log_softmax(x, 1), t[:, 1], reduction="none"),
                F.mse_loss(x, x.new_zeros(x.size(0), 20)), F.l1_loss(x, torch.zeros_like(x), reduction="sum"),
                F.binary_cross_entropy_with_logits(x, torch.ones_like(x)), F.smooth_l1_loss(x, x.detach() + 2),
            ),
            nn.Linear(20, 20),
        ),
        images(6, 20), ids(6, 2),
    ),
    "shapes": (
        lambda: Of1(
            lambda m, x: {
                "einsum": torch.einsum("...i,ij->...j", m.inner[0](x), m.inner[0].weight),
                "cut": torch.stack([x, x * 2], dim=1).chunk(2, dim=1)[1].squeeze(1)[..., 1:].flip(0),
                "picked": x[:, m.places] + x[m.places].mean(0)[m.places], "most": x.max(dim=1), "norm": x.norm(dim=1),
                "spread": x.std(dim=1, keepdim=True) + x.var(0, unbiased=False), "top": x.topk(2, dim=1)[0],
                "padded": F.pad(x, (1, 2), value=3.0), "view": x.unflatten(1, (2, 3)).permute(0, 2, 1).reshape(5, -1),
                "ways": torch.where(x > 0, x, -x).clamp(min=0.1) / 2 + x.T.sum() - x.cumsum(1) ** 2,
                "repeated": x.unsqueeze(0).repeat(2, 1, 1).narrow(1, 0, 3), "one": F.one_hot(x.argmax(1), 6),
                "gathered": x.gather(1, x.argsort(1)), "triangle": torch.tril(x), "parts": x.unbind(1)[2],
            },
            nn.Linear(6, 6), places=torch.tensor([0, 2, -1]),
        ),
        images(5, 6),
    ),
    "between pixels": (
        lambda: Of1(
            lambda m, x: (
                F.interpolate(x, scale_factor=2, mode="bilinear"), F.adaptive_avg_pool2d(x, 2),
                F.interpolate(x, size=(9, 9), mode="bicubic", align_corners=True), F.avg_pool2d(x, 3, 1, 1),
                F.max_pool2d(x, 3, 2, 1, ceil_mode=True), F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
            )
        ),
        images(2, 3, 4, 4),
    ),
    "activations": (
        lambda: nn.Sequential(
            nn.Linear(6, 6), nn.ELU(), nn.Hardswish(), nn.Mish(), nn.Softplus(), nn.PReLU(), nn.SELU(), nn.Softsign(),
            nn.Hardsigmoid(), nn.LogSigmoid(), nn.Hardtanh(), nn.GLU(), nn.Softmax(dim=1), nn.LogSoftmax(dim=1),
        ),
        images(4, 6),
    ),
}  # fmt: skip


def flat(result):
    """The tensors of a result, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for each in (result.values() if isinstance(result, dict) else result) for t in flat(each)]


def close(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        other = other.detach().numpy()
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(other).max(initial=0)))


@pytest.mark.parametrize(("make", "inputs"), [(m, i) for m, *i in MODULES.values()], ids=MODULES)
def test_values_gradients_and_statistics_are_those_of_pytorch(make, inputs):
    torch.manual_seed(0)
    module, given = make(), [each() for each in inputs]
    kept = copy.deepcopy(module.state_dict())
    module.eval()
    loaded = ht.from_torch(module, *given)
    assert not module.training and all((value == kept[n]).all() for n, value in module.state_dict().items())
    feed, outputs = dict(zip(loaded.inputs.values(), given)), [*loaded.outputs.values()]
    assert all(isinstance(node.shape[0], ht.core.types.Dim) for node in feed)
    with torch.no_grad():
        close(ht.Executor(outputs).run(feed), flat(module(*given)))
    module.train()
    leaves = {node: t.clone().requires_grad_() for node, t in feed.items() if t.is_floating_point()}
    floats = [y for y in flat(module(*(leaves.get(node, t) for node, t in feed.items()))) if y.is_floating_point()]
    draws = [np.random.default_rng(k).normal(size=y.shape).astype(np.float32) for k, y in enumerate(floats)]
    sum((y * torch.from_numpy(d)).sum() for y, d in zip(floats, draws)).backward()
    loss = sum(ht.sum(y * d) for y, d in zip((y for y in outputs if y.dtype == np.float32), draws))
    parameters, trained = dict(module.named_parameters()), dict[ht.Node, torch.Tensor](leaves)
    trained |= {v: parameters[name] for name, v in loaded.variables.items() if v.attrs["trainable"]}
    count = ht.variable("count", 0.0)
    ex = ht.Executor({"train": [*ht.gradients(loss, [*trained]), {count: count + 0 * loss}]})
    close(ex.run("train", feed)[:-1], [t.grad for t in trained.values()])
    buffers = {n: b for n, b in module.named_buffers() if n in loaded.variables}
    close([ex.state[loaded.variables[n]] for n in buffers], [*buffers.values()])


# -- how it stands in hetu -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flash", [True, False])
def test_sizes_stay_open(flash):
    module = GPT(flash).eval()
    loaded = ht.from_torch(module, ht.placeholder("ids", (None, None), "int64"))
    ex = ht.Executor([*loaded.outputs.values()])
    for shape in ((2, 5), (1, 12), (3, 9)):
        given = torch.randint(0, 20, shape)
        with torch.no_grad():
            close(ex.run({"ids": given}), [module(given)])


def test_it_trains_as_in_pytorch_and_goes_back():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    with ht.scope("backbone"):
        loaded = ht.from_torch(module, (None, 6))
    x, t = loaded.inputs["input"], ht.placeholder("t", (None,), "int64")
    loss = ht.mean(ht.softmax_cross_entropy(loaded.outputs["output"], t))
    ex = ht.Executor({"train": [loss, ht.optim.SGD(0.1).minimize(loss)]})
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(10):
        given, targets = torch.randn(8, 6), torch.randint(0, 3, (8,))
        wanted = F.cross_entropy(module(given), targets)
        close(ex.run("train", {x: given, t: targets})[:1], [wanted])
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
    assert {v.name for v in loaded.variables.values()} == {f"backbone/{name}" for name in loaded.variables}
    state = {name: torch.from_dlpack(ex.state[v].copy()) for name, v in loaded.variables.items()}
    close([v.numpy() for v in state.values()], [module.state_dict()[name] for name in state])
    assert module.load_state_dict(state, strict=False).unexpected_keys == []


def test_what_is_frozen_shared_or_a_buffer_is_known():
    module = GPT(False)
    module.ln1.requires_grad_(False)
    variables = ht.from_torch(module, ids(2, 5)()).variables
    assert "head.weight" not in variables and "wte.weight" in variables
    assert [n for n, v in variables.items() if not v.attrs["trainable"]] == ["ln1.weight", "ln1.bias", "seen"]


def test_dropout_drops_where_a_graph_trains():
    loaded = ht.from_torch(nn.Sequential(nn.Linear(4, 500), nn.Dropout(0.5)).eval(), (None, 4))
    y, count = loaded.outputs["output"], ht.variable("count", 0.0)
    for update, share in (([], 0), ([{count: count + 1}], 0.5)):
        zeros = ht.Executor([ht.mean(ht.astype(ht.equal(y, 0), "float32")), *update]).run({"input": np.ones((9, 4))})
        assert zeros[0] == pytest.approx(share, abs=0.05)


def test_inputs_may_be_nodes_and_what_is_the_same_in_every_step():
    x = ht.placeholder("x", (None, 3))
    module = type("Scaled", (nn.Module,), {"forward": lambda self, y, by=2.0, shift=None: y * by if not shift else y})()
    loaded = ht.from_torch(module, ht.relu(x), 3.0)
    assert ht.evaluate(loaded.outputs["output"], {x: [[1.0, -1.0, 2.0]]}).tolist() == [[3.0, 0.0, 6.0]]


ASSERTS = """
def forward(self, x):
    assert x.size(1) <= 4, "is wide"
    assert x.dim() == 2
    return x * x.shape[1]
"""  # as text, since pytest rewrites what it imports


def test_what_is_asserted_of_sizes_is_not_looked_at():
    names = {}
    exec(ASSERTS, names)
    module = type("Asserts", (nn.Module,), {"forward": names["forward"]})()
    loaded = ht.from_torch(module, (None, None))
    assert ht.evaluate(loaded.outputs["output"], {"x": [[1.0, 2.0]]}).tolist() == [[2.0, 4.0]]


class Asks(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def in_place(module, x):
    y = x * 2
    y.add_(1)
    y += x
    return F.relu(y, inplace=True) + y


def into_a_view(module, x):
    y = x * 2
    y[:, 0].add_(1)
    return y


def beside_a_view(module, x):
    y = x * 2
    beside = y.view(-1)
    y.add_(1)
    return beside


def into_a_buffer(module, x):
    module.count.add_(1)
    return x + module.count


def test_what_is_done_in_place_is_read_after():
    module, x = Of1(in_place), torch.randn(4, 3)
    close([ht.evaluate(ht.from_torch(module, x).outputs["output"], {"x": x})], [module(x)])


LACKING = {
    "functions": (
        lambda m, x: torch.fft.fft(x).real + m.inner[0](torch.linalg.det(x)),
        [r"\(2\): fft_fft in Of1 \(test_from_torch.py:\d+\); linalg_det in Of1 \(test_from_torch.py:\d+\)"],
    ),
    "modules": (
        lambda m, x: m.inner[1](torch.fft.fft(m.inner[0](m.inner[1](x)))),
        [r"\(2\): inner.1 in Of1 .*: symbolically traced variables cannot", "; fft_fft in Of1"],
    ),
    "options": (lambda m, x: F.cross_entropy(x, x.argmax(1), weight=x[0]), ["its weight is not None"]),
    "methods": (lambda m, x: x.unfold(0, 2, 1), ["unfold in Of1"]),
    "keywords": (lambda m, x: torch.sum(x, dim=1, out=x), ["sum in Of1 .*unexpected keyword argument 'out'"]),
    "a view": (into_a_view, ["add_ in Of1 .*: writes into a view of what others read"]),
    "beside a view": (beside_a_view, ["add_ in Of1 .*: writes into a variable, or into what others read as a view"]),
    "a buffer": (into_a_buffer, ["add_ in Of1 .*: writes into a variable"]),
    "itself": (lambda m, x: x if x.sum() > 0 else -x, ["forward of Of1 cannot be traced: symbolically traced"]),
}


@pytest.mark.parametrize(("function", "told"), LACKING.values(), ids=LACKING)
def test_all_that_lacks_is_named_with_its_place(function, told):
    module = Of1(function, nn.Linear(3, 3), Asks(), count=torch.zeros(3))
    before = {*vars(module)}
    with pytest.raises(ht.errors.DataError, match=".*".join(told)) as caught:
        ht.from_torch(module, (None, 3))
    assert caught.value.fix and {*vars(module)} == before


WRONG = {
    "no module": (lambda: ht.from_torch(3, (None, 3)), ht.errors.ArgumentError, "got a int"),
    "no input": (lambda: ht.from_torch(nn.Linear(3, 2)), ht.errors.ArgumentError, "takes input: .*; got 0 inputs"),
    "too many": (lambda: ht.from_torch(nn.ReLU(), (1,), (2,)), ht.errors.ArgumentError, "got 2 inputs"),
    "another size": (
        lambda: ht.from_torch(nn.Sequential(nn.Linear(3, 2)), (None, 4)),
        ht.errors.ShapeError,
        r"linear in Linear '0'.*sizes differ",
    ),
    "16 bits": (
        lambda: ht.from_torch(nn.Linear(3, 2).bfloat16(), (None, 3)),
        ht.errors.ArgumentError,
        r"weight in Linear.*: data got a Tensor whose numbers cannot be read: .*BFloat16",
    ),
}


@pytest.mark.parametrize(("call", "kind", "told"), WRONG.values(), ids=WRONG)
def test_mistakes_are_told(call, kind, told):
    with pytest.raises(kind, match=told) as caught:
        call()
    assert caught.value.fix
