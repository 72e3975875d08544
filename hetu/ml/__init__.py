"""Classic machine learning in scikit-learn's convention, on one process or many.

`estimator.py` says what an estimator is; `ESTIMATORS` names those that are here. Rows lie on workers (`comm=`), and
all that workers exchange is in `workers.py`, or goes over parameter servers, where `comm=` is a worker's `ht.ps.Client`
(`served.py`). What is differentiable is a hetu graph; counts and histograms are NumPy.
HetuML's pattern follows Angel: J. Jiang et al., "Angel: a new large-scale machine learning system", NSR 2018.
"""

from ..answers import answer_calls as _answer_calls
from .bayes import BernoulliNB, GaussianNB, MultinomialNB
from .boosting import GradientBoostingClassifier, GradientBoostingRegressor
from .clusters import KMeans
from .decomposition import NMF, PCA
from .estimator import Classifier, Clusterer, Estimator, NotFittedError, Regressor, Transformer
from .factorization import FactorizationMachineClassifier, FactorizationMachineRegressor
from .forest import DecisionTreeClassifier, DecisionTreeRegressor, RandomForestClassifier, RandomForestRegressor
from .inputs import Sparse
from .linear import LinearRegression, Ridge
from .margins import LinearSVC, LogisticRegression
from .mixture import GaussianMixture
from .neighbors import KNeighborsClassifier, KNeighborsRegressor
from .recommend import ALSRecommender
from .topics import LatentDirichletAllocation
from .workers import Workers

ESTIMATORS: dict[str, type[Estimator]] = {
    kind.__name__: kind
    for kind in (
        ALSRecommender, BernoulliNB, DecisionTreeClassifier, DecisionTreeRegressor,
        FactorizationMachineClassifier, FactorizationMachineRegressor, GaussianMixture, GaussianNB,
        GradientBoostingClassifier, GradientBoostingRegressor, KMeans, KNeighborsClassifier,
        KNeighborsRegressor, LatentDirichletAllocation, LinearRegression, LinearSVC, LogisticRegression,
        MultinomialNB, NMF, PCA, RandomForestClassifier, RandomForestRegressor, Ridge,
    )
}  # fmt: skip

__all__ = [
    "ALSRecommender", "BernoulliNB", "Classifier", "Clusterer", "DecisionTreeClassifier", "DecisionTreeRegressor",
    "ESTIMATORS", "Estimator", "FactorizationMachineClassifier", "FactorizationMachineRegressor", "GaussianMixture",
    "GaussianNB", "GradientBoostingClassifier", "GradientBoostingRegressor", "KMeans", "KNeighborsClassifier",
    "KNeighborsRegressor", "LatentDirichletAllocation", "LinearRegression", "LinearSVC", "LogisticRegression",
    "MultinomialNB", "NMF", "NotFittedError", "PCA", "RandomForestClassifier", "RandomForestRegressor", "Regressor",
    "Ridge", "Sparse", "Transformer", "Workers",
]  # fmt: skip
_answer_calls(__name__)
