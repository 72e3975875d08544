"""Published checkpoints: files in exactly their naming, which the tests write, load by name and compute the formula."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hetu as ht
from hetu import dist
from hetu.core.errors import ArgumentError, CheckpointError
from hetu.data.weights import PublishedWeights
from hetu.models import bert, gpt2, llama

from ..dist.models import communication
from .table import BERT_SEEN, VOCABULARY, WORDS, bert_, gpt2_, llama_

Names = dict[str, tuple[int, ...]]
V, F = VOCABULARY, 8


def gpt2_names(prefix: str) -> Names:
    layer = {
        "ln_1.weight": (F,), "ln_1.bias": (F,), "attn.c_attn.weight": (F, 3 * F), "attn.c_attn.bias": (3 * F,),
        "attn.c_proj.weight": (F, F), "attn.c_proj.bias": (F,), "ln_2.weight": (F,), "ln_2.bias": (F,),
        "mlp.c_fc.weight": (F, 4 * F), "mlp.c_fc.bias": (4 * F,), "mlp.c_proj.weight": (4 * F, F),
        "mlp.c_proj.bias": (F,),
    }  # fmt: skip
    layers = {f"h.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    whole = {"wte.weight": (V, F), "wpe.weight": (9, F)} | layers | {"ln_f.weight": (F,), "ln_f.bias": (F,)}
    return {prefix + name: shape for name, shape in whole.items()}


def llama_names(prefix: str) -> Names:
    f, width, hidden = 16, 4, 42
    layer = {
        "input_layernorm.weight": (f,), "self_attn.q_proj.weight": (4 * width, f),
        "self_attn.k_proj.weight": (2 * width, f), "self_attn.v_proj.weight": (2 * width, f),
        "self_attn.o_proj.weight": (f, 4 * width), "post_attention_layernorm.weight": (f,),
        "mlp.gate_proj.weight": (hidden, f), "mlp.up_proj.weight": (hidden, f), "mlp.down_proj.weight": (f, hidden),
    }  # fmt: skip
    layers = {f"layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    body = {"embed_tokens.weight": (V, f)} | layers | {"norm.weight": (f,)}
    return {prefix + name: shape for name, shape in body.items()} | {"lm_head.weight": (V, f)}


def bert_names(prefix: str, scale: str = "weight", bias: str = "bias") -> Names:
    def pair(name: str, outputs: int, inputs: int) -> Names:
        return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

    def norm(name: str) -> Names:
        return {f"{name}.LayerNorm.{scale}": (F,), f"{name}.LayerNorm.{bias}": (F,)}

    body = {f"embeddings.{n}_embeddings.weight": (s, F) for n, s in (("word", V), ("position", 9), ("token_type", 2))}
    body |= norm("embeddings")
    for h in ("encoder.layer.0", "encoder.layer.1"):
        for part in ("query", "key", "value"):
            body |= pair(f"{h}.attention.self.{part}", F, F)
        body |= pair(f"{h}.attention.output.dense", F, F) | norm(f"{h}.attention.output")
        body |= pair(f"{h}.intermediate.dense", 4 * F, F) | pair(f"{h}.output.dense", F, 4 * F) | norm(f"{h}.output")
    head = pair("cls.predictions.transform.dense", F, F) | norm("cls.predictions.transform")
    return {prefix + name: shape for name, shape in body.items()} | head | {"cls.predictions.bias": (V,)}


def bert_words(model: bert.BERT, x: ht.Node) -> ht.Node:
    return model.words(model(x, mask=ht.constant(value=BERT_SEEN)))


def apart(weights: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Queries, keys and values, which lie beside each other in files."""
    for array in weights:
        parts = [np.split(each, 3, axis=-1) for each in (array, next(weights))] if array.shape == (F, 3 * F) else []
        yield from (each for pair in zip(*parts) for each in pair)
        if not parts:
            yield array


class Family(NamedTuple):
    """How its files look, and what they mean: names in the order of `formula`, which linear weights lie turned in."""

    load: Callable[..., Any]
    names: Callable[..., Names]
    prefix: str
    heads: int
    turned: bool
    besides: Names  # what published files hold besides
    settings: dict[str, Any]
    output: Callable[[Any, ht.Node], ht.Node]
    formula: Callable[[Iterator[np.ndarray], np.ndarray], np.ndarray]


FAMILIES = {
    "gpt2": Family(
        gpt2.load, gpt2_names, "transformer.", 2, False,
        {"transformer.h.0.attn.bias": (1, 1, 9, 9), "h.1.attn.masked_bias": (), "lm_head.weight": (V, F)},
        {"n_head": 2, "layer_norm_epsilon": 1e-5, "n_layer": 2},
        lambda model, x: model(x), lambda w, x: gpt2_(apart(w), x),
    ),
    "llama": Family(
        llama.load, llama_names, "model.", 4, True, {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)},
        {"num_attention_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None},
        lambda model, x: model(x), llama_,
    ),
    "bert": Family(
        bert.load, bert_names, "bert.", 2, True,
        {"bert.embeddings.position_ids": (1, 9), "cls.seq_relationship.weight": (2, F),
         "cls.predictions.decoder.weight": (V, F), "bert.pooler.dense.weight": (F, F), "bert.pooler.dense.bias": (F,)},
        {"num_attention_heads": 2, "layer_norm_eps": 1e-12},
        bert_words, lambda w, x: bert_(w, x, BERT_SEEN),
    ),
}  # fmt: skip
CASES = [(name, form) for name in FAMILIES for form in ("bare", "prefixed", "half", "bfloat16", "folder", "parts")]


def numbers(names: Names) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: np.asarray(0.3 * rng.standard_normal(shape) + 0.1, "float32") for n, shape in names.items()}


def upper(a: np.ndarray) -> bytes:
    return (a.view("uint32") >> 16).astype("uint16").tobytes()


def write(folder: Path, family: Family, form: str) -> tuple[Path, dict[str, np.ndarray], dict[str, int]]:
    """A checkpoint in one of the forms that are published; its numbers, and what `load` must be told."""
    names = family.names("" if form == "bare" else family.prefix)
    kept = numbers(names | ({} if form == "bare" else family.besides))
    if form == "half":
        kept = {name: a.astype("float16") for name, a in kept.items()}
    if form == "bfloat16":  # the upper half of a float32
        kept = {name: np.asarray(a.view("uint32") & 0xFFFF0000).view("float32") for name, a in kept.items()}
    wanted = {name: kept[name].astype("float32") for name in names}
    if form == "parts":
        where = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(kept)}
        for file in {*where.values()}:
            save_file({name: a for name, a in kept.items() if where[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    elif form == "bfloat16":
        ends = [0, *accumulate(2 * a.size for a in kept.values())]
        entry = zip(kept.items(), pairwise(ends))
        said = {name: {"dtype": "BF16", "shape": a.shape, "data_offsets": at} for (name, a), at in entry}
        header = json.dumps(said).encode()
        parts = [len(header).to_bytes(8, "little"), header, *map(upper, kept.values())]
        (folder / "model.safetensors").write_bytes(b"".join(parts))
    else:
        save_file(kept, folder / "model.safetensors")
    if form in ("folder", "parts"):
        (folder / "config.json").write_text(json.dumps(family.settings))
        return folder, wanted, dict[str, int]()
    return folder / "model.safetensors", wanted, {"heads": family.heads}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_file_in_the_published_naming_computes_the_formula(name: str, form: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    path, kept, told = write(tmp_path, family, form)
    model = family.load(path, **told)
    y = family.output(model, ht.placeholder("x", WORDS.shape, "int64"))
    found = ht.Executor([y]).run({"x": WORDS})[0]
    turned = [n for n in kept if family.turned and kept[n].ndim == 2 and "embed" not in n]
    weights = iter([(a.T if n in turned else a).astype("float64") for n, a in kept.items()])
    np.testing.assert_allclose(found, family.formula(weights, WORDS), rtol=2e-4, atol=2e-5)
    assert next(weights, None) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_published_is_the_file_that_was_read(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    path, kept, told = write(tmp_path, family, "bare")
    model = family.load(path, **told)
    ex = ht.Executor([family.output(model, ht.placeholder("x", WORDS.shape, "int64"))])
    model.publish(ex.state, tmp_path / "again.safetensors")
    again = load_file(tmp_path / "again.safetensors")
    bare = {n.removeprefix("model.") if n != "lm_head.weight" else n: a for n, a in kept.items()}
    assert {n: a.tolist() for n, a in again.items()} == {n: a.tolist() for n, a in bare.items()}


def test_low_rank_updates_are_published_in_the_weights(tmp_path: Path) -> None:
    model = bert.BERT(V, F, 1, 2, positions=9)
    up = model.adapt("query", rank=2, scale=3.0)[1]
    x = ht.placeholder("x", WORDS.shape, "int64")
    ex = ht.Executor([model(x)])
    ex.state[up] = np.random.default_rng(0).standard_normal(up.shape)
    model.publish(ex.state, tmp_path / "whole.safetensors")
    again = ht.Executor([bert.load(tmp_path / "whole.safetensors", heads=2)(x)])
    np.testing.assert_allclose(again.run({"x": WORDS})[0], ex.run({"x": WORDS})[0], rtol=1e-4, atol=1e-5)


def test_parts_of_weights_are_not_published(tmp_path: Path) -> None:
    model = gpt2.GPT2(V, F, 1, 2, positions=9)
    part = {model.weights["wte.weight"].name: np.zeros((6, 8), "float32")}
    with pytest.raises(ArgumentError, match=r"wte\.weight' has shape \(11, 8\), here lies \(6, 8\)"):
        model.publish(part, tmp_path / "part.safetensors")


SPREAD = {"tensor": dist.TensorParallel, "zero3": lambda: dist.ZeRO(3), "stages": lambda: dist.Pipeline(2, 2)}


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_publishes_all_weights_or_none(name: str, strategy: str, tmp_path: Path) -> None:
    """A file without the weights of other stages was written, which nothing reads."""
    path, _, told = write(tmp_path, FAMILIES[name], "bare")

    def work(comm):
        model = FAMILIES[name].load(path, **told)
        x, t = (ht.placeholder(key, (None, WORDS.shape[1]), "int64") for key in "xt")
        loss = ht.mean(ht.softmax_cross_entropy(FAMILIES[name].output(model, x), t))
        ex = ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)], strategy=SPREAD[strategy](), comm=comm)
        file = tmp_path / f"{comm.rank}.safetensors"
        with pytest.raises(ArgumentError, match="here lies [\\s\\S]*load it in one process"):
            model.publish(ex.state, file)
        return file.exists()

    assert dist.run_ranks(2, work) == [False, False]


@pytest.mark.usefixtures("meaning")
def test_ranks_keep_heads_of_their_own_of_a_map_that_files_hold_as_one(tmp_path: Path) -> None:
    path, kept, told = write(tmp_path, FAMILIES["gpt2"], "bare")
    whole = kept["h.1.attn.c_attn.weight"]

    def work(comm):
        model = gpt2.load(path, **told)
        ex = ht.Executor([model(ht.placeholder("x", WORDS.shape, "int64"))], strategy=dist.TensorParallel(), comm=comm)
        ex.run({"x": WORDS})
        return [ex.state.contiguous(model.weights[f"h.1.attn.c_attn.{part}.weight"].name) for part in gpt2.QKV]

    for rank, found in enumerate(dist.run_ranks(2, work)):
        for n, array in enumerate(found):
            start = n * F + rank * F // 2
            np.testing.assert_array_equal(array, whole[:, start : start + F // 2])


DECODERS = {
    "gpt2": lambda layers: gpt2.GPT2(V, F, layers, 2, positions=9),
    "llama": lambda layers: llama.Llama(V, 2 * F, layers, 4, key_heads=2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DECODERS)
def test_a_layer_whose_heads_ranks_divide_sums_twice_each_way_and_gathers_nothing(name: str) -> None:
    """Behind the attention and behind the feed-forward part, M. Shoeybi et al., 2019, section 3."""

    def count(layers: int) -> Counter[str]:
        def model():
            x, t = (ht.placeholder(key, (None, 6), "int64") for key in "xt")
            loss = ht.mean(ht.softmax_cross_entropy(DECODERS[name](layers)(x), t))
            return {"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}, [{"x": WORDS, "t": WORDS}]

        return communication(model, dist.TensorParallel(), 2)

    assert count(2) - count(1) == {"all_reduce": 4}


def test_older_files_call_scale_and_bias_gamma_and_beta(tmp_path: Path) -> None:
    save_file(kept := numbers(bert_names("bert.", "gamma", "beta")), path := tmp_path / "model.safetensors")
    model = bert.load(path, heads=2)
    ex = ht.Executor([model.words(model(ht.constant(value=WORDS)))])
    gamma = kept["bert.encoder.layer.1.output.LayerNorm.gamma"]
    assert (ex.state[model.weights["encoder.layer.1.output.LayerNorm.weight"]] == gamma).all()


def test_a_head_that_the_file_lacks_is_drawn(tmp_path: Path) -> None:
    path, _, told = write(tmp_path, FAMILIES["bert"], "bare")
    model = bert.load(path, classes=3, **told)
    ex = ht.Executor([model.chances(model(ht.constant(value=WORDS)))])
    assert ex.run()[0].shape == (len(WORDS), 3)
    assert ex.state[model.weights["classifier.weight"]].std() > 0


def spoiled(**changes: Any) -> dict[str, np.ndarray]:
    """The numbers of GPT-2 with some other, or left out."""
    names = {name: changes.get(name, shape) for name, shape in (gpt2_names("") | changes).items()}
    return numbers({name: shape for name, shape in names.items() if shape is not None})


WRONG = {
    "missing": (spoiled(**{"h.1.ln_2.bias": None}), r"missing     h\.1\.ln_2\.bias: wanted \(8,\)"),
    "unexpected": (spoiled(**{"h.1.attn.q_norm": (4,)}), r"unexpected  h\.1\.attn\.q_norm: got \(4,\)"),
    "another word": (
        spoiled(**{"h.1.ln_2.bias": None, "h.1.ln2.bias": (F,)}),
        r"unexpected  h\.1\.ln2\.bias: got \(8,\), did you mean 'h\.1\.ln_2\.bias'\?",
    ),
    "different": (
        spoiled(**{"h.0.mlp.c_fc.weight": (4 * F, F)}),
        r"different   h\.0\.mlp\.c_fc\.weight: got \(32, 8\), wanted \(8, 32\)",
    ),
    "another family": (numbers(llama_names("model.")), r"has no 'wte\.weight'; it has "),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_told_before_anything_is_read(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, said = WRONG[case]
    save_file(kept, path := tmp_path / "model.safetensors")
    monkeypatch.setattr("hetu.data.weights.PublishedWeights.read", None)
    with pytest.raises(CheckpointError, match=said):
        gpt2.load(path, heads=2)


def cut_short(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])


def outside(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": "../model.safetensors"}}')


def far(folder: Path) -> None:
    """A layer of a number that is not followed up to."""
    save_file(spoiled(**{"h.1000000000.ln_1.bias": (F,)}), folder / "model.safetensors")


BROKEN = {
    "no map": (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "names 'None', wanted files"),
    "far": (far, r"missing     h\.2\.ln_1\.weight"),
    "cut short": (cut_short, "is no whole safetensors file"),
    "outside": (outside, r"names '\.\./model\.safetensors', wanted files beside it"),
    "gone": (lambda folder: (folder / "model.safetensors").unlink(), "there is no file of weights"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("[]"), "config.json is no JSON of names"),
    "no heads": (lambda folder: (folder / "config.json").unlink(), "shapes do not tell heads"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints_say_what_is_broken(case: str, tmp_path: Path) -> None:
    spoil, said = BROKEN[case]
    folder, _, _ = write(tmp_path, FAMILIES["gpt2"], "folder")
    spoil(folder)
    with pytest.raises(CheckpointError, match=said):
        gpt2.load(folder)


@pytest.mark.parametrize(
    ("name", "word"), [("gpt2", "n_head"), ("llama", "num_attention_heads"), ("bert", "num_attention_heads")]
)
@pytest.mark.parametrize("heads", [0, 3, "2", 2.0])
def test_heads_that_no_model_has_are_refused(name: str, word: str, heads: object, tmp_path: Path) -> None:
    folder, _, _ = write(tmp_path, FAMILIES[name], "folder")
    (folder / "config.json").write_text(json.dumps(FAMILIES[name].settings | {word: heads}))
    with pytest.raises(ArgumentError, match="positive integer|do not divide into 3 heads"):
        FAMILIES[name].load(folder)


def test_scaled_rotary_positions_are_refused(tmp_path: Path) -> None:
    folder, _, _ = write(tmp_path, FAMILIES["llama"], "folder")
    settings = FAMILIES["llama"].settings | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="rotary positions scaled by 'llama3'"):
        llama.load(folder)


def test_arrays_of_any_shape_are_read(tmp_path: Path) -> None:
    save_file(kept := numbers({"a": (10, 6), "b": (3,), "c": (), "d": (0, 4)}), path := tmp_path / "any.safetensors")
    found = PublishedWeights(path)
    assert {name: found.read(name).tolist() for name in found} == {name: a.tolist() for name, a in kept.items()}


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3, "int64")}, path := tmp_path / "ids.safetensors")
    with pytest.raises(CheckpointError, match="'a' holds numbers of I64, wanted floats"):
        PublishedWeights(path).read("a")
