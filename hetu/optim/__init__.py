"""The optimizers: each a rule in graph functions, written once, and a class that gives it its hyperparameters.

Of a table that is looked up, a step changes the looked up rows alone; `Optimizer` says how to change all. What a rule
means on rows, servers, parts and a GPU follows from it (`ops/update.py`); a new one has a row in `tests/samples`.
"""

from ..answers import answer_calls as _answer_calls
from ..ops.update import update_rule
from ..optimizer import Optimizer, OptimizerOptions, Updates, clip_by_global_norm
from ..updates import Average, accumulated, by_name
from .descent import FTRL, SGD, AdaGrad, Momentum, RMSProp, adagrad, ftrl, momentum, rmsprop, sgd
from .moments import LAMB, Adam, AdamW, AMSGrad, Lion, adam, amsgrad, lamb, lion

__all__ = [
    "Optimizer", "SGD", "Momentum", "AdaGrad", "RMSProp", "Adam", "AMSGrad", "AdamW", "LAMB", "Lion", "FTRL",
    "Average", "OptimizerOptions", "Updates", "accumulated", "by_name", "clip_by_global_norm", "update_rule",
    "adagrad", "adam", "amsgrad", "ftrl", "lamb", "lion", "momentum", "rmsprop", "sgd",
]  # fmt: skip

_answer_calls(__name__)
