"""Every operator. Importing this fills the table `hetu.graph.OPS`."""

from .activation import *
from .along_axis import *
from .attention import *
from .comparison import *
from .conv import *
from .creation import *
from .einsum import *
from .elementwise import *
from .functions import *
from .fused_update import *
from .index import *
from .join import *
from .leaf import *
from .linalg import *
from .loss import *
from .lstm import *
from .normalization import *
from .pooling import *
from .random import *
from .reduction import *
from .routing import *
from .shape import *
from .slicing import *
from .sorting import *
from .sparse import *
from .update import *
