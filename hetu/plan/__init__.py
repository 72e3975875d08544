"""Which strategy is best: `auto` simulates many, on ranks and with servers, and takes the fastest that fits.

`rebalance` takes another one while a job runs, where some of its ranks become slow.
"""

from ..answers import answer_calls as _answer_calls
from .costs.links import Cluster, DeviceFigures, Measured, Table, cluster
from .costs.profile import MachineProfile
from .plan import Plan, Within
from .search.auto import Auto, auto
from .search.candidates import Hints
from .simulation.instructions import bytes_between_ranks
from .simulation.simulate import Cost, simulate
from .simulation.timeline import Timeline, draw
from .simulation.trace import trace
from .simulation.trials import TrialRun, read_trials, trial
from .stragglers import Rebalance, rebalance
from .why import Why

__all__ = [
    "Auto", "Hints", "Plan", "Rebalance", "Why", "Within", "auto", "rebalance",
    "cluster", "Cluster", "Cost", "DeviceFigures", "Measured", "MachineProfile", "Table",
    "Timeline", "TrialRun", "read_trials", "simulate", "trace", "trial", "draw", "bytes_between_ranks",
]  # fmt: skip

_answer_calls(__name__)
