"""Which strategy is best: `auto` simulates many, on ranks and with servers, and takes the fastest that fits.

Ignored on purpose: changing the plan while training.
"""

from .candidates import Hints
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
