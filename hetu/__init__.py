"""hetu: a complete, minimal, educational deep-learning system on NumPy and CuPy.

A program finds everything here: operators (`ht.matmul`), builders (`ht.nn`, `ht.optim`, `ht.data`), `ht.Executor`,
`ht.fit`, and the tools that look inside. `ht.dist`, `ht.ps`, `ht.strategies`, `ht.plan`, `ht.ml`, `ht.automl`,
`ht.onnx`, `ht.from_torch`, `ht.generation` and `ht.script` are loaded when first touched.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing
from functools import partial as _partial

from . import data, embed, init, look, metrics, models, nn, optim, schedules
from . import foreign as _foreign  # which reads arrays of other libraries
from . import lent as _lent  # which enters what is read of a state
from . import passes as _passes  # which enters them
from . import switching as _switching  # which enters `Executor.switch`
from .answers import HELD as _HELD
from .answers import answer_calls as _answer_calls
from .answers import answer_names as _answer_names
from .core import errors
from .core.autodiff import gradients, recompute
from .core.backend import OWN as _OWN
from .core.executor import Executor, evaluate
from .core.graph import OPS as _OPS
from .core.graph import Graph, Node, rewrite, tagged
from .core.leaf import scope
from .core.op import TAKEN as _TAKEN
from .core.op import Role, op
from .core.placement import STRATEGIES as _STRATEGIES
from .core.placement import attaches as _attaches
from .core.state import State
from .data.loader import JOB as _JOB
from .gradcheck import check_gradients
from .inference import load_weights
from .job import job_size as _job_size
from .look.history import History
from .look.nans import debug_nans
from .look.profiler import Profile, profile
from .look.summary import summary
from .ops import *
from .saving import Checkpoints
from .serving import Predictor, save_model
from .training import fit

__version__ = "0.1.0"
__all__ = [
    # packages
    "automl", "data", "dist", "embed", "errors", "generation", "init", "look", "metrics", "ml", "models", "nn", "onnx",
    "optim", "plan", "ps", "schedules", "script", "strategies",
    # running, training, looking inside
    "Executor", "State", "evaluate", "fit", "Checkpoints", "load_weights", "save_model", "Predictor", "from_torch",
    "History", "profile", "Profile", "summary", "check_gradients", "debug_nans",
    # graphs
    "Graph", "Node", "gradients", "recompute", "rewrite", "scope", "tagged",
    # writing operators
    "op", "Role",
    # leaves and marks
    "placeholder", "variable", "constant", "stop_gradient", "if_training", "with_updates", "print",
    # creation and random numbers
    "arange", "full", "full_like", "ones_like", "zeros_like", "tril", "triu", "one_hot",
    "normal", "truncated_normal", "uniform", "randint", "bernoulli", "gumbel", "dropout", "dropout2d",
    # functions of one element; `+ - * / // % ** < <= > >=` of nodes are operators, too
    "abs", "sign", "square", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "sin", "cos", "atan",
    "tanh", "erf", "ceil", "floor", "round", "clip", "astype",
    # activations
    "relu", "leaky_relu", "elu", "gelu", "silu", "mish", "sigmoid", "softplus", "softmax", "log_softmax",
    # comparison and choice
    "equal", "not_equal", "isfinite", "isnan", "logical_and", "logical_or", "logical_xor", "logical_not",
    "maximum", "minimum", "where",
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_invert", "bitwise_left_shift", "bitwise_right_shift",
    # reduction and order
    "sum", "mean", "var", "prod", "max", "min", "norm", "logsumexp", "cumsum", "all", "any", "argmax", "argmin",
    "sort", "argsort", "topk",
    # shapes, joining, cutting
    "reshape", "flatten", "squeeze", "expand_dims", "broadcast_to", "broadcast_like", "sum_to_like",
    "permute_dims", "matrix_transpose", "flip", "roll", "concat", "stack", "split", "tile", "repeat", "pad",
    # rows by index
    "take", "take_along_axis", "embedding", "scatter_add", "moe_slots", "moe_dispatch", "moe_combine",
    "bag_ids", "embedding_bag", "pair_products", "pairs_of_sums", "field_bags", "field_products",
    # products and layers as functions
    "matmul", "linear", "outer", "einsum", "sparse_matmul", "sampled_matmul", "scaled_dot_product_attention",
    "gru", "lstm", "conv2d", "conv_transpose2d", "max_pool2d", "avg_pool2d", "global_max_pool2d", "global_avg_pool2d",
    "interpolate", "batch_norm", "layer_norm", "group_norm", "rms_norm",
    # losses
    "softmax_cross_entropy", "binary_cross_entropy_with_logits", "nll_loss", "kl_divergence",
    "mse_loss", "mae_loss", "huber_loss",
]  # fmt: skip
look.install()
_TAKEN.update(_OPS)
_HELD.update(_OPS.values())
_answer_calls(__name__)
_answer_names(errors.__name__)
_JOB["shard"] = lambda: _importlib.import_module("hetu.dist.alone").own_part()
_OWN["gpu"] = lambda: _importlib.import_module("hetu.dist.comm.nccl").own_gpu()
if _job_size() > 1:  # else nothing of hetu.dist is needed
    _attaches(type(None))(lambda *given: _importlib.import_module("hetu.dist.alone").alone(*given))


if "IPython" in _sys.modules and (_shell := _sys.modules["IPython"].get_ipython()) is not None:
    from .teach.notebook.cells import follow as _follow

    _follow(_shell)


def _strategy(package: str, builder: str, *given: int, **options: bool) -> _typing.Any:
    return getattr(_importlib.import_module(f".{package}", __name__), builder)(*given, **options)


_STRATEGIES |= {
    "auto": _partial(_strategy, "plan", "auto"),
    "auto-inexact": _partial(_strategy, "plan", "auto", exact=False),
    "dp": _partial(_strategy, "dist", "DataParallel"),
    "zero1": _partial(_strategy, "dist", "ZeRO", 1),
    "zero2": _partial(_strategy, "dist", "ZeRO", 2),
    "zero3": _partial(_strategy, "dist", "ZeRO", 3),
    "tp": _partial(_strategy, "dist", "TensorParallel"),
    "ep": _partial(_strategy, "dist", "ExpertParallel"),
    "pp": _partial(_strategy, "dist", "Pipeline"),
    "ps": _partial(_strategy, "strategies", "ParameterServer"),
    "hybrid": _partial(_strategy, "strategies", "Hybrid"),
    "partial": _partial(_strategy, "strategies", "PartialReduce"),
}


def load_ipython_extension(shell: _typing.Any) -> None:
    """What `%load_ext hetu` calls: cells that begin with `%%ranks 4` run on many ranks."""
    from .teach import notebook

    notebook.load_ipython_extension(shell)


if _typing.TYPE_CHECKING:
    from . import automl, dist, generation, ml, onnx, plan, ps, script, strategies
    from .pytorch import from_torch
else:

    def __getattr__(name: str) -> object:
        if name in ("automl", "dist", "generation", "ml", "onnx", "plan", "ps", "script", "strategies"):
            return _importlib.import_module(f".{name}", __name__)
        if name == "from_torch":
            return getattr(_importlib.import_module(f"{__name__}.pytorch"), name)
        raise AttributeError(name)  # which the module then answers
