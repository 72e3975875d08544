"""Automatic machine learning: a machine that chooses among algorithms, their numbers, and what is done to columns.

Read `space.py` (what may be chosen), `samplers.py` (what to try next), `schedules.py` (how long) and `search.py`.
What is searched is any function, so it is for a graph as for an estimator; `tabular.py` has estimators that choose
themselves.
"""

from ..answers import answer_calls as _answer_calls
from .blocks import Alternating, Conditioning
from .gaussian import GaussianProcess
from .result import Search
from .samplers import TPE, Bayesian, Forest, RandomSampler, Sampler, Surrogate
from .schedules import ASHA, BudgetSchedule, Halving, Hyperband, Population, Proposal, WholeBudget
from .search import Attempt, search
from .space import Categorical, Float, Int, Space
from .tabular import Algorithm, AutoClassifier, AutoRegressor
from .trials import Trial

__all__ = [
    "search", "Search", "Attempt", "Trial", "Space", "Float", "Int", "Categorical",
    "Sampler", "RandomSampler", "TPE", "Bayesian", "Surrogate", "GaussianProcess", "Forest",
    "Conditioning", "Alternating",
    "BudgetSchedule", "Proposal", "WholeBudget", "ASHA", "Halving", "Hyperband", "Population",
    "AutoClassifier", "AutoRegressor", "Algorithm",
]  # fmt: skip
_answer_calls(__name__)
