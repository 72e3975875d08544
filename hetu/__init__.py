"""hetu: a complete, minimal, educational deep-learning system on NumPy and CuPy.

Everything a program needs is here: operators (`ht.matmul`), builders (`ht.nn`, `ht.optim`, `ht.data`), `ht.Executor`,
`ht.fit`, and what looks inside. Ignored on purpose: optional parts (`hetu.dist`) are imported by those who use them.
"""

from typing import Any

from . import data, errors, graph, init, metrics, nn, optim, schedules, show
from .autodiff import gradients, recompute
from .executor import Executor, debug_nans, evaluate
from .gradcheck import check_gradients
from .graph import Graph, Node, rewrite, scope, tagged
from .op import op
from .ops import *
from .placement import STRATEGIES
from .profiler import Profile, profile
from .state import State
from .summary import summary
from .training import History, fit

__version__ = "0.1.0"
show.install()


def _auto() -> Any:
    from . import plan

    return plan.auto()


STRATEGIES["auto"] = _auto


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    fix = errors.did_you_mean(name, [n for n in globals() if not n.startswith("_")])
    raise errors.UnknownNameError(f"hetu has no {name!r}", fix=fix)
