"""Where what is learned is kept: strategies that join the ranks of `hetu.dist` and the servers of `hetu.ps`.

`auto` chooses among them by simulating each. Ignored on purpose: changing the plan while training.
"""

from .candidates import Hints
from .hybrid import Choice, Hybrid
from .links import Cluster, Measured, Table, dgx_h100
from .plan import Plan, Within
from .planner import Auto, auto
from .profile import Profile
from .simulate import Cost, simulate
from .timeline import Timeline
from .trace import trace
from .traffic import bytes_between_ranks
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
