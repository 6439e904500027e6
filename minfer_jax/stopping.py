"""Stop strings, matched on bytes over the whole generated stream."""

from __future__ import annotations

from collections.abc import Sequence

from minfer_jax.errors import UsageError


class StopFilter:
    """Lets bytes through up to the first stop string, which may be spread over many tokens.

    Bytes that may yet turn out to begin a stop string are held back; `flush` gives them out if
    the generation ends without one. Of several stop strings the one that begins first counts.
    """

    def __init__(self, stop: Sequence[str | bytes] = ()) -> None:
        if isinstance(stop, str | bytes):
            stop = [stop]
        self._stops = [s.encode() if isinstance(s, str) else bytes(s) for s in stop]
        if any(not s for s in self._stops):
            raise UsageError("a stop string is empty")
        self._held = b""
        self.stopped = False

    def feed(self, data: bytes) -> bytes:
        """Add a token's bytes; returns those that are certain to lie before any stop string."""
        if self.stopped:
            return b""
        self._held += data
        found = [i for s in self._stops if (i := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            # A longer stop string that begins earlier and is not complete does not count.
            return self._release(min(found))
        return self._release(self._first_possible_start())

    def flush(self) -> bytes:
        """What was held back, once no more bytes will come."""
        return b"" if self.stopped else self._release(len(self._held))

    def _release(self, n: int) -> bytes:
        out, self._held = self._held[:n], self._held[n:]
        return out

    def _first_possible_start(self) -> int:
        """Where the longest end of the held bytes lies that begins some stop string."""
        n = len(self._held)
        longest = max((len(s) for s in self._stops), default=1) - 1
        for start in range(max(0, n - longest), n):
            tail = self._held[start:]
            if any(s.startswith(tail) for s in self._stops):
                return start
        return n
