"""Trial runs: what plans took by the clocks of a job, a log of it, and what it teaches (AutoSync, NeurIPS 2020).

The simulator knows neither other programs nor ranks that share cores, and a machine only as it was profiled. What it
misses depends on what a plan does: ridge regression learns log(measured / simulated) from numbers about the plans. A
line of the log is one trial in JSON, so `cat` merges logs. Left out: how long servers take.
"""

from __future__ import annotations

import json
import math
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ArgumentError
from ...core.executor import Executor
from ...core.graph import topological
from ...core.state import FilePath
from ...core.subgraph import SubGraph
from ...dist.comm.comm import Comm
from ...dist.comm.world import world
from ...dist.cut.on_ranks import spread
from ...dist.cut.strategy import Strategy
from ...files import check_place
from ...plain_data import written
from ...ranges import AtLeast0, AtLeast1, Positive
from ..costs.profile import MachineProfile, cache_path, fingerprint, known_profile, signature
from .simulate import SERVERS, Cost, simulate
from .timeline import COMMUNICATION

VERSION = 1
TRACED = 8  # ranks of which features are the mean
LEAST, FOLDS = 8, 5  # plans from which anything is learned; parts that are held out in turn
APART = math.log(1.1)  # plans that are nearer to each other have no order
STRENGTHS = (0.1, 1.0, 10.0)  # of the pull of weights to 0, where features have a deviation of 1
FEATURES = (
    *("compute", "communication", "hidden", "instructions", "messages", "inner", "outer", "served"),
    *("peak", "ranks", "stages", "parts", "microbatches"),
)


@dataclass(frozen=True)
class TrialRun:
    """A step of a plan: `analytic` seconds were predicted, and `seconds` passed on the ranks of a job.

    `model` stands for the graph and what it is fed, `machine` for the host and the profile by which it was predicted.
    `features` by name: seconds and counts of a rank, in the mean of the first ranks (`hidden` is communication behind
    which it computes); bytes within hosts, between them and with servers; the fullest rank's bytes; degrees.
    """

    name: str
    model: str
    machine: str
    features: Mapping[str, AtLeast0]
    analytic: Positive
    seconds: Positive
    version: AtLeast1 = VERSION


def read_trials(path: FilePath) -> list[TrialRun]:
    """The trials in a log. ArgumentError if there is none.

    Lines that are none, such as those of another version, are left out with a warning that says how many.
    """
    found, problems, lines = list[TrialRun](), list[str](), list[bytes]()
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        problems.append(str(error.strerror))
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']!r}, wanted {VERSION}")
            found.append(TrialRun(**data | {"features": {name: data["features"][name] for name in FEATURES}}))
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"line {number}: {error!r:.120}")
    if not found:
        why = (problems or ["it is empty"])[0]
        raise ArgumentError(f"no trials in {path}: {why}", fix="make some: ht.plan.trial(..., log=...)")
    if problems:
        text = f"{path}: {len(problems)} of {len(lines)} lines are no trials and left out; {problems[0]}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return found


def trial(
    entries: Sequence[Any],
    strategy: Any,
    feed: Mapping[Any, Any],
    *,
    log: FilePath | None = None,
    profile: MachineProfile | None = None,
    comm: Comm | None = None,
    steps: AtLeast1 = 5,
    precision: str = "float32",
) -> TrialRun:
    """Run `entries` (what an executor is given) under a strategy or plan on all ranks of the job, which all call this.

    Of `steps` steps, after two to warm up, the median counts, and of each step the slowest rank, by wall clock. Rank 0
    adds the trial to the file `log`. `profile` predicts; by default that of this host. The model trains on `feed`, and
    computes products in `precision`.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 4))
    >>> loss = ht.mean(ht.nn.Linear(4, 4)(x) ** 2)
    >>> entries = [loss, ht.optim.SGD(0.1).minimize(loss)]
    >>> run = trial(entries, ht.dist.DataParallel(), {x: [[1.0] * 4] * 2}, profile=MachineProfile(), steps=1)
    >>> run.features["ranks"], run.features["stages"], run.seconds > 0
    (1.0, 1.0, True)
    """
    comm, profile = comm or world(), profile or known_profile()
    if log is not None:
        check_place(Path(log))
    executor = Executor(entries, strategy=strategy, comm=comm, precision=precision)
    took = np.empty(2 + steps)
    for k in range(len(took)):
        comm.barrier()
        began = time.perf_counter()
        executor.run(feed)
        took[k] = time.perf_counter() - began
    comm.all_reduce(took, took, "max")
    shapes = {key: np.shape(value) for key, value in feed.items()}
    of: Any = {"world_size": comm.world_size, "shapes": shapes, "traced": TRACED, "precision": precision}
    cost = simulate(entries, strategy, profile, **of)
    features = features_of(cost, spread(executor.placement).strategy, profile)
    graph = [signature(node) for node in topological(SubGraph("trial", entries).written.outputs)]
    model, name = _mark([graph, *shapes.values()]), getattr(strategy, "name", None) or f"{strategy!r:.80}"
    run = TrialRun(name, model, machine_of(profile), features, cost.time, float(np.median(took[2:])))
    if log is not None and comm.rank == 0:
        with open(log, "ab+") as file:
            file.seek(max(0, file.tell() - 1))
            cut_off = file.read() not in (b"", b"\n")  # by a kill
            file.write(b"\n" * cut_off + json.dumps(asdict(run)).encode() + b"\n")
    return run


def trials_path() -> Path:
    """Where `heturun --trials` keeps its log: beside this host's profile."""
    return cache_path().with_name(f"trials-{fingerprint()}.jsonl")


def machine_of(profile: MachineProfile) -> str:
    """What trials that may be compared have in common: the host, its rates and its links."""
    links = profile.cluster.inner, profile.cluster.outer
    return _mark(written([profile.host or fingerprint(), profile.device, links]))


def _mark(data: Any) -> str:
    return f"{zlib.crc32(json.dumps(data).encode()):08x}"


def features_of(cost: Cost, strategy: Strategy, profile: MachineProfile) -> dict[str, float]:
    """What a trial keeps of a plan. Of a batch, `parts` are made for ranks, and of each of them `microbatches`."""
    events, host = cost.timeline.events, profile.cluster.host
    lanes = [cost.timeline.overlap(rank) for rank in {event.rank for event in events}]
    messages = sum(event.lane == COMMUNICATION for event in events)
    sums = *np.sum([(a.compute, a.communication, a.both) for a in lanes], axis=0), len(events) - messages, messages
    sent = [0, 0, 0]
    for (source, target), nbytes in cost.sent.items():
        sent[2 if SERVERS in (source, target) else host(source) != host(target)] += nbytes
    sizes = max(cost.peak), len(cost.peak), len(strategy.grids()), parts_of(strategy), strategy.microbatches
    return dict(zip(FEATURES, map(float, (*(total / len(lanes) for total in sums), *sent, *sizes))))


def parts_of(strategy: Strategy) -> int:
    """How many parts of a batch are made for ranks."""
    splits = [[n for role, n in layout.axes().values() if role >= 0] for layout in strategy.feeds.values()]
    return max(map(math.prod, splits), default=1)


def learned(trials: Sequence[TrialRun], machine: str) -> np.ndarray:
    """What the trials of a machine teach: numbers for `factor`. Those of others are left out with a warning.

    All factors are 1 if there are fewer than 8 trials, and unless they put clearly more pairs of held trials in order:
    two plans of one model on as many ranks that are over 10 % apart. Models are held out whole if there are at least 5,
    else trials.
    """
    here, numbers = [t for t in trials if t.machine == machine], np.zeros(len(FEATURES) + 4)
    if others := len(trials) - len(here):
        text = f"{others} of {len(trials)} trials are of another machine or profile and left out"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    if len(here) < LEAST:
        return numbers
    told, real = (np.log([getattr(t, name) for t in here]) for name in ("analytic", "seconds"))
    x = np.array([_vector(t.features, t.analytic) for t in here])
    names = [t.model for t in here], [f"{t.model} {t.features['ranks']}" for t in here]
    models, same = (np.unique(of, return_inverse=True)[1] for of in names)
    folds = (models if max(models) >= FOLDS - 1 else np.arange(len(here))) % FOLDS
    apart = (real - real[:, None] > APART) & (x != x[:, None]).any(axis=2)
    faster, slower = np.nonzero(apart & (same == same[:, None]))

    before, gain = told[faster] < told[slower], 0
    for strength in STRENGTHS:
        held = told.copy()
        for inside in (folds == fold for fold in range(FOLDS)):
            held[inside] += _logs(_fit(x[~inside], (real - told)[~inside], strength), x[inside])
        after = held[faster] < held[slower]
        if (more := int(after.sum() - before.sum())) > max(gain, math.sqrt((after != before).sum())):  # else by chance
            gain, numbers = more, _fit(x, real - told, strength)
    return numbers


def factor(numbers: np.ndarray, features: Mapping[str, float], analytic: float) -> float:
    """How many times the simulated seconds a plan takes. Beyond what was seen it goes no further.

    >>> factor(learned([], "here"), dict.fromkeys(FEATURES, 1.0), 1e-3)
    1.0
    """
    return float(np.exp(_logs(numbers, _vector(features, analytic))))


def _vector(features: Mapping[str, float], analytic: float) -> np.ndarray:
    """Shares of the simulated step that compute, communicate and do both, and all else by its logarithm."""
    found = np.array([features[name] for name in FEATURES])
    return np.array([*found[:3] / analytic, *np.log1p(found[3:]), math.log(analytic)])


def _fit(x: np.ndarray, y: np.ndarray, strength: float) -> np.ndarray:
    """Weights, what is added, the least and the largest that was seen; features that did not vary weigh nothing."""
    z, pull = x - x.mean(axis=0), strength * len(x) * np.diag(x.var(axis=0) + 1e-9)
    w = np.linalg.solve(z.T @ z + pull, z.T @ (y - y.mean()))
    return np.array([*w, y.mean() - x.mean(axis=0) @ w, y.min(), y.max()])


def _logs(numbers: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Logarithms of the factors of plans, which are the rows of `x`."""
    found: np.ndarray = np.clip(x @ numbers[:-3] + numbers[-3], numbers[-2], numbers[-1])
    return found
