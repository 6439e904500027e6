"""Stop strings, matched on bytes over the whole generated stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minfer_jax.errors import UsageError


class StopFilter:
    """Lets bytes through up to the first stop string, which may be spread over many tokens.

    Bytes that may yet turn out to begin a stop string are held back; `flush` gives them out if
    the generation ends without one. Of several stop strings the one that is complete first
    counts, and of those that end together the longest: how the bytes were cut makes no difference.
    """

    def __init__(self, stop: Sequence[str | bytes] = ()) -> None:
        if isinstance(stop, str | bytes):
            stop = [stop]
        if not isinstance(stop, Iterable):
            raise UsageError(f"stop is {stop!r}; allowed: a list of texts")
        self.stops = [_bytes_of(s) for s in stop]
        self._held = b""
        self.stopped = False

    def feed(self, data: bytes) -> bytes:
        """Add a token's bytes; returns those that are certain to lie before any stop string."""
        if self.stopped:
            return b""
        self._held += data
        found = [(i + len(s), i) for s in self.stops if (i := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            _, start = min(found)
            return self._release(start)
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
        longest = max((len(s) for s in self.stops), default=1) - 1
        for start in range(max(0, n - longest), n):
            tail = self._held[start:]
            if any(s.startswith(tail) for s in self.stops):
                return start
        return n


def _bytes_of(stop: str | bytes) -> bytes:
    """One stop string as bytes; raises `UsageError` for what can never be one."""
    if not isinstance(stop, str | bytes):
        raise UsageError(f"a stop string is {stop!r}; allowed: text")
    if not stop:
        raise UsageError("a stop string is empty")
    try:
        return stop.encode() if isinstance(stop, str) else stop
    except UnicodeEncodeError:
        raise UsageError(f"stop string {stop!a} holds a lone surrogate, which is no text") from None
