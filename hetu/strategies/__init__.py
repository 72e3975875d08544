"""Strategies beyond layouts: what joins `hetu.dist` and `hetu.ps`, so that servers keep some variables and ranks the
others, and the builders of AutoDist (`autodist.py`).

Read `servable.py` (which), `hybrid.py` (the builders), `served.py` and `serving.py` (what they write), then
`on_servers.py`, which makes of it one rank's graph.

>>> ParameterServer().apart
True
"""

from ..answers import answer_calls as _answer_calls
from .autodist import (
    PS,
    AllReduce,
    Parallax,
    PartitionedAR,
    PartitionedPS,
    PSLoadBalancing,
    RandomAxisPartitionAR,
    UnevenPartitionedPS,
)
from .hybrid import Hybrid, ParameterServer
from .on_servers import Connected, OnServers
from .partners import Averaged, OnPartners, PartialReduce
from .servable import Choice
from .served import Served
from .serving import Serving, ServingStages

__all__ = [
    "Averaged", "Choice", "Connected", "Hybrid", "OnPartners", "OnServers", "ParameterServer", "PartialReduce",
    "Served", "Serving", "ServingStages",
    "PS", "PSLoadBalancing", "PartitionedPS", "UnevenPartitionedPS",
    "AllReduce", "PartitionedAR", "RandomAxisPartitionAR", "Parallax",
]  # fmt: skip

_answer_calls(__name__, workers=(Connected, OnServers, OnPartners))
