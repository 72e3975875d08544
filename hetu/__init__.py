"""hetu: a complete, minimal, educational deep-learning system on NumPy and CuPy.

Everything a program needs is here: operators (`ht.matmul`), builders (`ht.nn`, `ht.optim`, `ht.data`), `ht.Executor`,
`ht.fit`, and what looks inside. Ignored on purpose: optional parts (`hetu.dist`) are imported by those who use them.
"""

from typing import Any

from . import data, init, look, metrics, nn, optim, schedules
from .core import errors, graph
from .core.autodiff import gradients, recompute
from .core.executor import Executor, debug_nans, evaluate
from .core.graph import Graph, Node, rewrite, scope, tagged
from .core.op import op
from .core.placement import STRATEGIES
from .core.state import State
from .gradcheck import check_gradients
from .look.profiler import Profile, profile
from .look.summary import summary
from .ops import *
from .training import History, fit

__version__ = "0.1.0"
look.install()


def _auto() -> Any:
    from . import plan

    return plan.auto()


STRATEGIES["auto"] = _auto


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext hetu` calls: cells that begin with `%%ranks 4` run on many ranks."""
    from .teach import notebook

    notebook.load_ipython_extension(shell)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    fix = errors.did_you_mean(name, [n for n in globals() if not n.startswith("_")])
    raise errors.UnknownNameError(f"hetu has no {name!r}", fix=fix)
