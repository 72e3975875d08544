"""What a search found, as it looks while it goes on and at its end: the best, a table, a picture, and what mattered.

F. Hutter et al., "An Efficient Approach for Assessing Hyperparameter Importance", ICML 2014: the share of the variance
of the loss that a name has by itself, of a model of the loss. Left out: importance of pairs.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from ..core.errors import DataError
from ..job import job_size
from ..look.curves import curves_svg
from ..look.growing import growing_curves
from ..look.svg import Svg
from ..progress import bar, in_notebook
from ..ranges import Count
from .gaussian import GaussianProcess
from .space import Categorical, Config, Space
from .trials import Log, Trial

HOPELESS = 5  # failed trials, and none that did not, after which a search is given up
SHOWN, WIDTH = 10, 100  # rows of a table, and the width of its last column
SAMPLES, PLACES = 128, 12  # configurations, and values of a name, over which its share is averaged


class Search:
    """What a search has found; `trials` are all of them, in the order in which they began.

    Printed it is a table of the best, in a notebook with a picture.

    >>> from hetu.automl import Float, search
    >>> found = search(lambda run: run["x"], {"x": Float(0.0, 1.0)}, trials=10, maximize=True)
    >>> found.value(found.best) == found.so_far()[-1], found.rows(1)[0][:2], [*found.why()]
    (True, ('trial', 'value'), ['x'])
    """

    def __init__(self, space: Space, log: Log, maximize: bool) -> None:
        self.space, self._log, self.maximize = space, log, maximize

    @property
    def trials(self) -> list[Trial]:
        return self._log.trials

    def value(self, trial: Trial) -> float:
        """What the objective answered; infinite, or its negative, if it failed."""
        return -trial.cost if self.maximize else trial.cost

    @property
    def ranked(self) -> list[Trial]:
        """The trials that ended well, the best first: of those that learned longest, then of the others."""
        ended = [trial for trial in self.trials if trial.ok]
        return sorted(ended, key=lambda trial: (-trial.budget, trial.cost, trial.number))

    @property
    def best(self) -> Trial:
        """The best of the trials that learned longest; DataError if none ended well."""
        if not self.ranked:
            raise DataError("no trial ended well", fix="look at the `error` of its trials")
        return self.ranked[0]

    def so_far(self) -> list[float]:
        """After each trial that ended, the best value until then, of any budget."""
        losses = [trial.cost for trial in self.trials if trial.ended]
        best = np.minimum.accumulate(losses) if losses else np.empty(0)
        return [float(-loss if self.maximize else loss) for loss in best]

    # -- looking ---------------------------------------------------------------------------------------------

    def rows(self, most: Count = SHOWN) -> list[tuple[str, ...]]:
        """The best trials as rows of text, below a heading."""
        budgets = len({trial.budget for trial in self.trials}) > 1
        heading = ("trial", "value", *(["budget"] if budgets else []), "seconds", "configuration")
        rows = [
            (
                str(trial.number), f"{self.value(trial):.5g}", *([f"{trial.budget:g}"] if budgets else []),
                f"{trial.seconds:.2g}", textwrap.shorten(shown(trial.config), WIDTH, placeholder=" ..."),
            )
            for trial in self.ranked[:most]
        ]  # fmt: skip
        return [heading, *rows]

    def __repr__(self) -> str:
        best = f", best {self.value(self.best):.5g}" if self.ranked else ""
        return f"<{type(self).__name__}: {self._counted()}{best}>"

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]) - 1)]
        lines = ["  ".join([*(cell.rjust(w) for cell, w in zip(row, widths)), row[-1]]) for row in rows]
        return "\n".join([*lines, self._counted(), *self._told()])

    def _counted(self) -> str:
        states = [
            "failed" if trial.ended and not trial.ok else "running" if not trial.ended else "" for trial in self.trials
        ]
        told = [f"{states.count(state)} {state}" for state in ("failed", "running") if state in states]
        return ", ".join([f"{len(states)} trials", *told])

    def _told(self) -> list[str]:
        """The last error, if a trial failed."""
        last = next((trial for trial in reversed(self.trials) if trial.error), None)
        return [] if last is None else [f"trial {last.number} failed: {last.error}"]

    def svg(self) -> Svg:
        """The value of each trial that ended well, and the best so far."""
        ended = [trial for trial in self.trials if trial.ended]
        values = [self.value(trial) if trial.ok else math.nan for trial in ended]
        return curves_svg({"best so far": self.so_far(), "trial": values}, label="trials", up="value")

    def _repr_html_(self) -> str:
        return f"{self.svg()}<pre>{self}</pre>"

    def why(self) -> dict[str, float]:
        """The share of the variance of the loss that each name has by itself, from 0 to 1, the largest first.

        What their sum leaves of 1 is of several names together. DataError below 10 trials.
        """
        told = self.ranked
        if len(told) < 10:
            raise DataError(f"{len(told)} trials that ended well tell too little", fix="run 10 or more")
        x = self.space.vectors(self.space.places([trial.config for trial in told]))
        y = np.array([trial.cost for trial in told])
        y = np.clip(y, None, np.quantile(y, 0.9))  # what the worst do says little of the rest
        model = GaussianProcess()
        model.fit(x, (y - y.mean()) / (y.std() or 1.0))
        rng = np.random.default_rng(0)
        drawn = self.space.scattered(SAMPLES, rng)
        all_of_it = float(model.foretell(self.space.vectors(drawn))[0].var())
        parts = {name: self._variance(name, model, drawn) for name in self.space.names}
        all_of_it = max(all_of_it, sum(parts.values())) or 1.0  # both are of samples, of which one may be less
        return {name: parts[name] / all_of_it for name in sorted(parts, key=lambda name: -parts[name])}

    def _variance(self, name: str, model: GaussianProcess, drawn: np.ndarray) -> float:
        """The variance over values of a name of what is foretold on average, where the name is active."""
        domain, column, means = self.space.domains[name], self.space.names.index(name), []
        here = drawn[~np.isnan(drawn[:, column])]
        choice = [*map(domain.place, domain.options)] if isinstance(domain, Categorical) else []
        for value in choice or np.linspace(0, 1, PLACES):
            here[:, column] = value
            means.append(model.foretell(self.space.vectors(here))[0].mean() if len(here) else 0.0)
        return float(np.var(means)) * len(here) / len(drawn)

    # -- while it goes on ------------------------------------------------------------------------------------

    def refuse_if_all_fail(self) -> None:
        """DataError where the first trials have all failed: the objective is wrong, not what it was called with."""
        ended = [trial for trial in self.trials if trial.ended]
        if len(ended) >= HOPELESS and not any(trial.ok for trial in ended):
            raise DataError(f"all of the first {len(ended)} trials failed; the last:\n{ended[-1].error}")

    @contextmanager
    def shown(self, total: Count, progress: bool | None) -> Iterator[Callable[[], None]]:
        """A bar with the best so far, and in a notebook a picture that grows."""
        notebook = growing_curves() if progress is None and in_notebook() and job_size() == 1 else None
        with bar("trials", total, progress) as running:

            def show() -> None:
                running.update(sum(trial.ended for trial in self.trials) - running.n)
                if self.ranked:
                    running.set_postfix_str(f"best {self.value(self.best):.5g}")
                if notebook is not None:
                    notebook(self)

            yield show


def shown(config: Config) -> str:
    """A configuration in a line.

    >>> shown({"model": "ridge", "model.ridge.alpha": 0.123456})
    'model=ridge alpha=0.1235'
    """
    return " ".join(
        f"{name.rsplit('.', 1)[-1]}={value:.4g}" if isinstance(value, float) else f"{name.rsplit('.', 1)[-1]}={value}"
        for name, value in config.items()
    )
