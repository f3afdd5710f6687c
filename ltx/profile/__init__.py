"""What a step sends and what it takes: before it runs, on paper, and as it runs.

==================================  ==============================================================================
:func:`explain`                     what a step will send, bucket by bucket, before anything runs
:func:`plan`                        what a step will take on a network that you describe
:func:`compare`                     what it takes here, with several strategies in turns
:func:`record`                      every collective of a piece of program, with times and bytes
:func:`timeline`                    the same as a picture, or as a file for a trace viewer
:func:`measure_network`             bandwidth and latency between the ranks
==================================  ==============================================================================
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ltx.core.comm.network import Network, measure_network
from ltx.profile.recording import record
from ltx.profile.traces import Timeline, Trace, timeline

if TYPE_CHECKING:
    from ltx.profile.comparison import Comparison, compare
    from ltx.profile.explanation import Explanation, explain
    from ltx.profile.step_plan import Cost, plan

# Imported when first asked for: programs that only train use none of them.
_LATER = {
    "Comparison": "ltx.profile.comparison",
    "Cost": "ltx.profile.step_plan",
    "Explanation": "ltx.profile.explanation",
    "compare": "ltx.profile.comparison",
    "explain": "ltx.profile.explanation",
    "plan": "ltx.profile.step_plan",
}

__all__ = [
    "Comparison",
    "Cost",
    "Explanation",
    "Network",
    "Timeline",
    "Trace",
    "compare",
    "explain",
    "measure_network",
    "plan",
    "record",
    "timeline",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
