"""The search: ask a schedule and a sampler, run the objective, write down what came out; by any number of processes.

Every process that calls `search` with the same log takes part, and returns when all is done; one that calls it later
returns at once. A process that is killed loses the trial that it was at, which another one begins anew.
"""

from __future__ import annotations

import math
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, HetuError, UnknownNameError, did_you_mean
from ..core.leaf import scope
from ..core.state import FilePath
from ..job import job_size
from ..ranges import AtLeast0, AtLeast1, Count, Endless, Positive, Seed
from .result import Search
from .samplers import Bayesian, Sampler
from .schedules import BudgetSchedule, Proposal, Standing, WholeBudget
from .space import Config, Space
from .trials import LEASE, Log, Trial, worker_name

WAIT = 0.05  # seconds between two looks at what others do


@dataclass(frozen=True)
class Attempt(Mapping[str, Any]):
    """What an objective is called with: its configuration, by name, and how far it may go.

    `budget` is how much it may have learned at its end. `folder` is for what it keeps; `before` is that of the trial
    from which it goes on, whose budget was `learned`, or None.

    >>> run = Attempt({"model": "ridge", "model.ridge.alpha": 0.5}, 1.0, Path())
    >>> run["model"], run.inside("model")
    ('ridge', {'alpha': 0.5})
    """

    config: Config
    budget: Positive
    folder: Path
    before: Path | None = None
    learned: AtLeast0 = 0.0
    number: Count = field(default=0, compare=False)

    def __getitem__(self, name: str) -> Any:
        if name not in self.config:
            raise UnknownNameError(f"no {name!r} in the configuration", fix=did_you_mean(name, self.config))
        return self.config[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.config)

    def __len__(self) -> int:
        return len(self.config)

    def inside(self, choice: str) -> Config:
        """What is chosen inside of the option of a choice, by the names that it has there; UnknownNameError for a name
        that it does not have."""
        if choice not in self.config:
            raise UnknownNameError(f"no {choice!r} in the configuration", fix=did_you_mean(choice, self.config))
        before = f"{choice}.{self.config[choice]}."
        return {name.removeprefix(before): value for name, value in self.config.items() if name.startswith(before)}


def search(
    objective: Callable[[Attempt], float],
    space: Mapping[str, Any],
    *,
    trials: AtLeast1 = 60,
    maximize: bool = False,
    sampler: Sampler | None = None,
    schedule: BudgetSchedule | None = None,
    seconds: Endless = math.inf,
    log: FilePath | None = None,
    task: str = "",
    seed: Seed = 0,
    progress: bool | None = None,
) -> Search:
    """Look for the configuration for which `objective(run)` is least, or with `maximize` greatest.

    `trials` are begun at most, none of them later than after `seconds`. A trial whose objective raises, or answers no
    number, has failed, which samplers avoid; if the first five all fail, so does the search. `log` is a file: processes
    that name the same one search together, and a search that was broken off goes on; one of another space, seed or
    `task`, a text of yours, is refused. One process alone proposes the same for the same `seed`.

    >>> from hetu.automl import Float
    >>> found = search(lambda run: (run["x"] - 2) ** 2, {"x": Float(0.0, 5.0)}, trials=12)
    >>> bool(abs(found.best.config["x"] - 2) < 0.1)
    True
    """
    laid = Space(space)
    if log is None and job_size() > 1:
        raise ArgumentError("a search on several ranks without a log", fix='pass log="search.jsonl" on all ranks')
    facts = {"space": laid.described(), "seed": seed, "maximize": maximize, "task": task}
    kept = Log(None if log is None else Path(log), facts)
    plan = _Searched(laid, sampler or Bayesian(), schedule or WholeBudget(), trials, seed)
    found, until = Search(laid, kept, maximize), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as own, found.shown(trials, progress) as show:
        folders = Path(own) if kept.path is None else kept.path.with_name(f"{kept.path.name}.kept")
        while (trial := _begun(kept, plan, until)) is not None:
            _attend(objective, trial, kept, folders, maximize)
            show()
            found.refuse_if_all_fail()
    return found


@dataclass(frozen=True)
class _Searched:
    """Which trials there are to be."""

    space: Space
    sampler: Sampler
    schedule: BudgetSchedule
    trials: int
    seed: int

    def proposal(self, trials: list[Trial]) -> Proposal | None:
        """What is to run next, by the number of trials so far."""
        rng = np.random.default_rng([self.seed, len(trials)])
        # Of trials of one configuration that go on from each other, the last; what learned less says less.
        goes_on = {(trial.parent, repr(trial.config)) for trial in trials}
        told = [trial for trial in trials if (trial.number, repr(trial.config)) not in goes_on]

        def new() -> Config:
            return self.sampler.propose(self.space, told, rng)

        return self.schedule.propose(Standing(trials, self.space, rng, new))

    def over(self, trials: list[Trial]) -> bool:
        return len(trials) >= self.trials or not self.schedule.left(trials)


def _begun(log: Log, plan: _Searched, until: float) -> Trial | None:
    """The next trial of this process, written down; None when all is done. It waits for what depends on others."""
    while True:
        with log.held():
            now = time.time()
            for lost in log.lost(now):  # begun anew under its number, so that what depends on it comes as well
                if not log.take_over(lost, now).ended:
                    return lost
            over = plan.over(log.trials) or time.monotonic() > until
            if not over and (made := plan.proposal(log.trials)) is not None:
                trial = Trial(len(log.trials), made.config, made.budget, made.parent, made.notes)
                trial.worker, trial.seen = worker_name(), now
                log.begin(trial)
                return log.trials[-1]
            if over and all(trial.ended for trial in log.trials):
                return None
            if not over and all(trial.ended for trial in log.trials):
                raise ArgumentError(
                    f"{type(plan.schedule).__name__} proposes nothing, and no trial runs", fix="let left() say False"
                )
        time.sleep(WAIT)


def _attend(objective: Callable[[Attempt], float], trial: Trial, log: Log, folders: Path, maximize: bool) -> None:
    """Attempt one trial; its process says meanwhile that it lives."""
    parent = None if trial.parent is None else log.trials[trial.parent]
    folder = folders / str(trial.number)
    folder.mkdir(parents=True, exist_ok=True)
    before = None if parent is None else folders / str(parent.number)
    run = Attempt(trial.config, trial.budget, folder, before, 0.0 if parent is None else parent.budget, trial.number)
    ended = Event()

    def live() -> None:
        while not ended.wait(LEASE / 4):
            log.tell(trial, seen=time.time())

    sign = Thread(target=live, daemon=True)
    sign.start()
    began, loss, error = time.perf_counter(), math.inf, ""
    try:
        with scope("trial"):  # so that what a trial builds has the names that its parent's had, and can be loaded
            value = float(objective(run))
        loss = -value if maximize else value
        error = "" if math.isfinite(value) else f"the objective answered {value}"
    except HetuError as raised:
        error = raised.text()
    except Exception as raised:  # an objective may fail; the search goes on
        last = traceback.extract_tb(raised.__traceback__)[-1]
        error = f"{type(raised).__name__}: {raised}\n  at {Path(last.filename).name}:{last.lineno}"
    finally:
        ended.set()
        sign.join()
    log.tell(trial, loss=loss if math.isfinite(loss) else math.inf, error=error, seconds=time.perf_counter() - began)
