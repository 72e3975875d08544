"""Every operator. Importing this fills the table `hetu.core.graph.OPS`; what a user calls has its name here.

Operators that only passes, gradients and optimizers make are named by their modules alone.
"""

import types
import typing

from ..core.graph import FUNCTIONS as _FUNCTIONS
from ..core.leaf import *
from ..core.operators import *
from . import grow, sketch, topics, trees, update
from .activation import *
from .along_axis import *
from .attention import *
from .bags import *
from .bits import *
from .conv import *
from .creation import *
from .einsum import *
from .elementwise import *
from .error_function import *
from .gru import *
from .index import *
from .join import *
from .linalg import *
from .loss import *
from .lstm import *
from .normalization import *
from .pooling import *
from .printing import *
from .random import *
from .reduction import *
from .rounding import *
from .routing import *
from .scan import *
from .shape import *
from .slicing import *
from .sorting import *
from .sparse import *

if not typing.TYPE_CHECKING:  # a checker knows that stars take no modules; Python enters each here and takes it along
    __all__ = [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, types.ModuleType)]
    _FUNCTIONS.update(__all__)
