"""Find out what a step sends and how long it takes.

==================================  ==============================================================================
:func:`compare`                     how long steps take here, with several strategies in turns
:func:`record`                      every collective of a block of code, with times and bytes
:func:`timeline`                    a recording as a picture, or as a file for a trace viewer
==================================  ==============================================================================
"""

from ltx.profile.traces import Comparison, Timeline, Trace, compare, record, timeline

__all__ = ["Comparison", "Timeline", "Trace", "compare", "record", "timeline"]


def __dir__() -> list[str]:
    return sorted(__all__)
