"""Find out what a step sends and how long it takes, before it runs or while it runs.

==================================  ==============================================================================
:func:`explain`                     what a step will send, bucket by bucket, before anything runs
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
    from ltx.profile.explanation import Explanation, explain

# These modules are imported at first use: programs that only train don't need them.
_LATER = {
    **dict.fromkeys(("Comparison", "compare"), "ltx.profile.comparison"),
    **dict.fromkeys(("Explanation", "explain"), "ltx.profile.explanation"),
}

__all__ = [
    "Comparison",
    "Explanation",
    "Timeline",
    "Trace",
    "compare",
    "explain",
    "record",
    "timeline",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
