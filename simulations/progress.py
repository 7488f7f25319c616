"""A progress bar on stderr; a line every few seconds where that is no terminal, as in the log of a job."""

import sys
import time
from typing import TextIO

_EVERY_S = {True: 0.2, False: 5.0}
_WIDTH = 40


class ProgressBar:
    """Call with (done, total). Says nothing of work that is over sooner than it would first speak.

    Args:
        what: is being done.
        stream: where to; stderr by default.
    """

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._began_s = self._shown_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Shows the state if it is time to, and the end of what was shown before."""
        now_s = time.monotonic()
        has_spoken = self._shown_s > self._began_s
        if now_s - self._shown_s < _EVERY_S[self._is_terminal] and not (done == total and has_spoken):
            return
        self._shown_s = now_s
        elapsed_s = now_s - self._began_s
        left_s = elapsed_s / max(done, 1) * (total - done)
        text = f"{self._what}: {done}/{total}, {elapsed_s:.0f} s, about {left_s:.0f} s left"
        if self._is_terminal:
            filled = "#" * round(_WIDTH * done / max(total, 1))
            text = f"\r[{filled:<{_WIDTH}}] {text}  "
        print(text, end="\n" if not self._is_terminal or done == total else "", file=self._stream, flush=True)
