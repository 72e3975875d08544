"""A parameter server: tables on server processes, three consistency modes, a bounded cache, partial reduce.

Read `consistency.py`, `store.py` (the whole server, without I/O), then `server.py` and `client.py`, which only carry
its messages. `hetu.strategies` turns an optimizer into pushes and pulls.

>>> from hetu.ps import SSP, ParameterStore
>>> ParameterStore(2, SSP(3)).status()["consistency"]
'ssp:3'
"""

from ..answers import answer_calls as _answer_calls
from ..codec import Compress
from ..growth import UNBOUNDED, Growth
from .saved import export_rows, import_rows
from .store.bigraph import BigraphPartition, partition_bigraph
from .store.cache import CachedTable
from .store.consistency import ASP, BSP, SSP, Consistency, consistency
from .store.functions import server_function
from .store.messages import ProtocolError, RefusedError
from .store.partial_reduce import Controller, Group
from .store.partition import Parameter, partition
from .store.placed import Placed
from .store.policies import Cache, Counters, hot_rows
from .store.store import ParameterStore
from .store.table_spec import TableSpec
from .wire.client import Client
from .wire.elements import map_elements, sum_elements
from .wire.environment import connect
from .wire.pending import PendingReply
from .wire.server import Options, ServerError, ServerProcess, make_keys
from .wire.transport import ServerRestartedError, ServerTimeoutError

__all__ = [
    "ASP", "BSP", "SSP", "Consistency", "consistency", "ParameterStore", "TableSpec",
    "server_function", "connect", "Options", "ServerProcess", "make_keys", "Client", "PendingReply", "Parameter",
    "partition", "Growth", "UNBOUNDED", "export_rows", "import_rows",
    "Cache", "CachedTable", "Counters", "hot_rows", "Controller", "Group",
    "Compress", "map_elements", "sum_elements", "Placed", "BigraphPartition", "partition_bigraph",
    "ProtocolError", "RefusedError", "ServerError", "ServerRestartedError", "ServerTimeoutError",
]  # fmt: skip

_answer_calls(
    __name__, workers=(CachedTable, Client, Controller, Counters, ParameterStore, PendingReply, ServerProcess)
)
