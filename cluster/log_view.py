"""The log of a job on a terminal: lines scroll, the newest progress stays at the bottom, in place."""

import re
import shutil
import time
from collections.abc import Callable
from typing import TextIO

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROGRESS = re.compile(
    r"(?:\(\w+ pid=\d+[^)]*\) )?(?P<text>(?:step (?P<step>\d+)/(?P<steps>\d+)  |[\w ]+: \d+/\d+, \d+ s, ).*)"
)
_BAR = 20
_CLEAR = "\r\x1b[2K"


class LogView:
    """Call with each line of the log.

    Where the stream is no terminal every line is printed as it is: a log file is to hold all of them.

    Args:
        stream: where to.
        clock: seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._progress = ""
        self._first: tuple[int, float] | None = None

    def __call__(self, line: str) -> None:
        """Shows one line, without its end."""
        found = _PROGRESS.fullmatch(_COLOUR.sub("", line)) if self._is_terminal else None
        if found is None:
            self._write(f"{_CLEAR if self._progress else ''}{line}\n{self._progress}")
            return
        self._progress = self._fit(self._bar(found) + found["text"])
        self._write(_CLEAR + self._progress)

    def end(self) -> None:
        """Leaves the newest progress where it stands; what is printed next begins on a new line."""
        if self._progress:
            self._write("\n")
        self._progress = ""

    def _bar(self, found: re.Match[str]) -> str:
        """How far a run is and how long it will take, from the steps seen since the first one."""
        if found["step"] is None:
            return ""
        step, steps, now = int(found["step"]), max(int(found["steps"]), 1), self._clock()
        if self._first is None or step < self._first[0]:
            self._first = (step, now)
        begun, since = self._first
        left = f" {(now - since) / (step - begun) * (steps - step):.0f} s left" if step > begun else ""
        filled = "#" * round(_BAR * min(step / steps, 1))
        return f"[{filled:<{_BAR}}]{left}  "

    def _fit(self, text: str) -> str:
        """A line that wraps could not be taken back."""
        return text[: shutil.get_terminal_size().columns - 1]

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
