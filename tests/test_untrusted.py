"""Nothing in hetu makes code or objects out of data: no pickle, marshal, eval, exec, unsafe YAML, or shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hetu"
FILES = sorted(PACKAGE.rglob("*.py"))

MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "copyreg"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
FUNCTIONS = {"builtins": BUILTINS, "os": {"system", "popen"}, "subprocess": {"getoutput", "getstatusoutput"},
             "torch": {"load"},
             "yaml": {"load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all", "Loader",
                      "FullLoader", "UnsafeLoader", "CLoader", "CFullLoader", "CUnsafeLoader"}}  # fmt: skip
ALLOWED = {
    "teach/notebook/rank.py": {"exec", "compile"},  # the cells that the user runs are code
    "teach/notebook/pool.py": {"compile"},  # to see which names they read
    "teach/notebook/wire.py": {
        "pickle",
        "cloudpickle",
        "compile",
    },  # between processes of one user, by a private socket
}


def dangers(source: str) -> Iterator[str]:
    """What a file uses that could run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [alias.name for alias in node.names]
            yield from MODULES & {name.split(".")[0] for name in (module, *names)}
            yield from FUNCTIONS.get(module, set()) & set(names)
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in FUNCTIONS.get(node.value.id, ()):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Constant) and node.value in MODULES:  # importlib.import_module("pickle")
            yield str(node.value)
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell") and not _is_false(node.value):
            yield node.arg


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(PACKAGE).as_posix())
def test_no_data_becomes_code(file: Path) -> None:
    allowed = ALLOWED.get(file.relative_to(PACKAGE).as_posix(), set())
    assert set(dangers(file.read_text("utf-8"))) <= allowed


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "def f():\n    from marshal import loads", "import dill as d", "import_module('cloudpickle')",
        "eval('1')", "f = exec", "builtins.eval('1')", "compile('1', '', 'eval')", "__import__('x')",
        "yaml.load(text)", "from yaml import unsafe_load", "yaml.load(text, Loader=yaml.FullLoader)",
        "np.load(f, allow_pickle=True)", "np.load(f, allow_pickle=maybe)", "subprocess.run(c, shell=True)",
        "os.system('ls')", "from os import popen", "torch.load(f)",
    ],
)  # fmt: skip
def test_the_walker_sees_a_danger(source: str) -> None:
    assert list(dangers(source))


@pytest.mark.parametrize(
    "source",
    ["re.compile('a')", "model.eval()", "yaml.safe_load(t)", "json.loads(t)", "np.load(f, allow_pickle=False)"],
)
def test_the_walker_lets_the_rest_pass(source: str) -> None:
    assert not list(dangers(source))
