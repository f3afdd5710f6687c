"""Which calls follow which: a rank expects what has followed before, and compares with its peers what it doesn't."""

_LONG, _KEPT = 16, 1024  # of the stretches of calls that are looked for, and of the calls that are kept


class Habit:
    """What ranks have called on a channel, and so what comes next if it goes on as it did before.

    Ranks that have called the same expect the same. So if each compares what it doesn't expect, though it is known, no
    two of them issue different collectives: where they are about to, one at least compares, and its peers answer.
    """

    def __init__(self) -> None:
        self._calls: list[int] = []  # the fingerprints of the last ones
        self._next = 0  # the place in them of what came after the like of the last ones; of the last one if nothing did
        self._compared = 0  # up to this number of issue ranks have compared

    def expects(self, fingerprint: int, issue: int) -> bool:
        """Whether ranks needn't compare a known call at this number of `issue`."""
        return issue < self._compared or self._calls[self._next : self._next + 1] == [fingerprint]

    def compared(self, until: int) -> None:
        """Ranks have compared all calls before the number `until` of issue, and none behind it."""
        self._compared = until

    def add(self, fingerprint: int) -> None:
        calls = self._calls
        usual = calls[self._next : self._next + 1] == [fingerprint]
        calls.append(fingerprint)
        if usual:
            self._next += 1
        else:
            # The place after the longest earlier stretch of calls that the last ones repeat, the latest of these.
            self._next, longest, last = len(calls) - 1, 0, len(calls) - 1
            for place in (place for place in range(last) if calls[place] == fingerprint):
                length = 1
                while length < min(_LONG, place + 1) and calls[place - length] == calls[last - length]:
                    length += 1
                if length >= longest:
                    self._next, longest = place + 1, length
        if len(calls) > 2 * _KEPT:
            del calls[:_KEPT]
            self._next = max(self._next - _KEPT, 0)
