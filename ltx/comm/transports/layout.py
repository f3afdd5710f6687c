"""Where what lies in a rank's segment of shared memory: counters, tags, sums, a failure's text, and slots for chunks.

Words have 8 bytes. Each counter has a cache line of its own.
"""

#: Slots for chunks.
SLOTS = 8
#: Bytes before the first slot.
COUNTERS_BYTES = 4096

_LINE_WORDS = 64 // 8
#: Counters of the chunks that the rank has filled, reduced and emptied.
FILLED, REDUCED, EMPTIED = (i * _LINE_WORDS for i in range(3))
#: One tag for each slot.
TAGS = 3 * _LINE_WORDS
#: One sum for each slot.
SUMS = TAGS + SLOTS
#: The length of the text that says why the rank's end has failed; 0 as long as it hasn't.
FAILED = SUMS + SLOTS
#: The byte at which that text begins.
REASON = COUNTERS_BYTES // 2
