"""Cases of exact enumeration (forerun.testing.engines), with the drafters that need a file (methods.py)."""

import functools

from forerun.testing import engines
from support import needed

Case = functools.partial(engines.Case, needs=needed)
