"""The private parts of torch that funshard uses; tests/house/test_torch_facts.py pins each of them.

Most is about torch.func's stack of transforms, for which torch has no public questions; the rest about what autograd saves
and runs, storages, and process groups.
"""

from .backward import *
from .compiling import *
from .dispatch import *
from .errors import *
from .groups import *
from .levels import *
from .modules import *
from .storage import *
from .tracing import *
