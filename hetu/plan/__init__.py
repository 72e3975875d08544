"""Where what is learned is kept: strategies that join the ranks of `hetu.dist` and the servers of `hetu.ps`.

`auto` chooses among them by simulating each. Ignored on purpose: changing the plan while training.
"""

from .costs.links import Cluster, Measured, Table, dgx_h100
from .costs.profile import Profile
from .hybrid import Choice, Hybrid
from .plan import Plan, Within
from .search.candidates import Hints
from .search.planner import Auto, auto
from .simulation.simulate import Cost, simulate
from .simulation.timeline import Timeline
from .simulation.trace import trace
from .simulation.traffic import bytes_between_ranks
from .why import Why

__all__ = [
    "Auto",
    "Hints",
    "Plan",
    "Why",
    "Within",
    "auto",
    "Choice",
    "Hybrid",
    "Cluster",
    "Cost",
    "Measured",
    "Profile",
    "Table",
    "Timeline",
    "dgx_h100",
    "simulate",
    "trace",
    "bytes_between_ranks",
]
