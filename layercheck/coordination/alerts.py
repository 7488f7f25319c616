"""What went wrong without ending anything: told once to the session, kept for a person who asks."""

from collections import deque

_KEPT = 20


class Alerts:
    """`recent` are the last ones, told or not."""

    def __init__(self) -> None:
        self._untold: list[str] = []
        self.recent: deque[str] = deque(maxlen=_KEPT)

    def add(self, text: str) -> None:
        """The same words are not told twice in one answer."""
        if text not in self._untold:
            self._untold.append(text)
            self.recent.append(text)

    def take(self) -> tuple[str, ...]:
        """All that was not told yet."""
        told, self._untold = tuple(self._untold), []
        return told
