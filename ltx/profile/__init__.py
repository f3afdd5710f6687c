"""Find out what a step sends and how long it takes.

==================================  ==============================================================================
:func:`compare`                     how long steps take here, with several strategies in turns
:func:`record`                      every collective of a block of code, with times and bytes
:func:`timeline`                    a recording as a picture, or as a file for a trace viewer
==================================  ==============================================================================
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ltx.profile.traces import Timeline, Trace, record, timeline

if TYPE_CHECKING:
    from ltx.profile.comparison import Comparison, compare

# This is imported at first use: programs that only train don't need it.
_LATER = ("Comparison", "compare")

__all__ = [
    "Comparison",
    "Timeline",
    "Trace",
    "compare",
    "record",
    "timeline",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("ltx.profile.comparison"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
