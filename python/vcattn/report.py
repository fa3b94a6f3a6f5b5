"""What became of the calls that a host made: served, or left to the host's own attention and why."""

from __future__ import annotations

import warnings
from collections import Counter


class Report:
    """Counts of one integration; calls in compiled code count once for each compilation or not at all.

    served: calls that vcattn answered. fallbacks: calls that the host's own attention answered, by the reason.
    """

    __slots__ = ("served", "short_calls", "_short_reason", "_fallbacks", "_integration", "_host", "_warned")

    def __init__(self, integration: str, host: str, *, short_reason: str = "") -> None:
        self.served = 0
        self.short_calls = 0  # of fallbacks, those for `short_reason`; counted where every nanosecond does
        self._short_reason = short_reason
        self._fallbacks: Counter[str] = Counter()
        self._integration, self._host = integration, host
        self._warned = False

    @property
    def fallbacks(self) -> Counter[str]:
        """A copy of the counts by reason."""
        found = Counter(self._fallbacks)
        if self.short_calls:
            found[self._short_reason] += self.short_calls
        return found

    def count_fallback(self, reason: str, *, quiet: bool, stacklevel: int = 3) -> None:
        """Counts a fallback; the first that is not quiet warns, at the frame `stacklevel` above this one."""
        self._fallbacks[reason] += 1
        if not quiet and not self._warned:
            self._warned = True
            text = f"{self._integration} leaves calls to {self._host}: {reason} (reported once)"
            warnings.warn(text, stacklevel=stacklevel)

    def __repr__(self) -> str:
        return f"Report(served={self.served}, fallbacks={dict(self.fallbacks)})"
