"""Every error that ltx raises.

Each derives from :class:`LtxError` and from the built-in that a caller would expect, so that both
``except ltx.errors.LtxError`` and ``except ValueError`` do what they say. A message names the rank and the leaf
path where there is one, what was expected, what came, and what to do.
"""

from ltx.core.base.errors import *  # noqa: F403
from ltx.core.base.errors import __all__

for _name in __all__:
    globals()[_name].__module__ = __name__  # tracebacks and pickles name the module that programs import
del _name
