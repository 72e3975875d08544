"""Classic machine learning in scikit-learn's convention, on one process or many.

`estimator.py` says what an estimator is; `ESTIMATORS` names those that are here. Rows lie on workers (`comm=`), and
all that workers exchange is in `workers.py`. What is differentiable is a hetu graph; counts and histograms are NumPy.
HetuML's pattern follows Angel: J. Jiang et al., "Angel: a new large-scale machine learning system", NSR 2018.
"""

from ..answers import answer_calls as _answer_calls
from .estimator import Classifier, Clusterer, Estimator, NotFittedError, Regressor, Transformer
from .linear import LinearRegression, Ridge
from .margins import LinearSVC, LogisticRegression
from .workers import Workers

ESTIMATORS: dict[str, type[Estimator]] = {
    "LinearRegression": LinearRegression,
    "LinearSVC": LinearSVC,
    "LogisticRegression": LogisticRegression,
    "Ridge": Ridge,
}

__all__ = [
    "ESTIMATORS",
    "Classifier",
    "Clusterer",
    "Estimator",
    "LinearRegression",
    "LinearSVC",
    "LogisticRegression",
    "NotFittedError",
    "Regressor",
    "Ridge",
    "Transformer",
    "Workers",
]
_answer_calls(__name__)
