"""The log of a job: all lines where it is kept, progress in place on a terminal."""

from io import StringIO

import pytest

from cluster.log_view import LogView
from tests.fakes import Clock

STEP = "step {}/90  loss 4.1000  900 tokens/s  3 layers written  max age 4  stall 12 ms"


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def shown(text: str) -> list[str]:
    """What stands on the terminal at the end: a line that was cleared is gone."""
    return [line.rpartition("\x1b[2K")[2] for line in text.split("\n")]


def test_a_file_gets_every_line_as_it_is() -> None:
    stream = StringIO()
    view = LogView(stream)
    lines = [
        "data: 12 sequences",
        STEP.format(1),
        "\x1b[36m(RayTrainWorker pid=7)\x1b[0m hello",
        STEP.format(2),
    ]
    for line in lines:
        view(line)
    view.end()
    assert stream.getvalue() == "\n".join(lines) + "\n"


def test_on_a_terminal_the_newest_progress_stays_below_what_scrolls() -> None:
    stream, clock = Terminal(), Clock()
    view = LogView(stream, clock)
    view("data: 12 sequences")
    view("\x1b[36m(RayTrainWorker pid=7, ip=10.0.0.1)\x1b[0m " + STEP.format(9))
    clock.sleep(10)
    view(STEP.format(14))
    view("a worker died")
    view.end()
    first, second, last, rest = shown(stream.getvalue())
    assert (first, second, rest) == ("data: 12 sequences", "a worker died", "")
    assert last.startswith("[###                 ] 152 s left  step 14/90  loss 4.1000")
    assert len(last) < 80


def test_the_progress_of_a_simulation_is_one_too() -> None:
    stream = Terminal()
    view = LogView(stream)
    view("sweep: 3/20, 12 s, about 68 s left")
    view("sweep: 4/20, 16 s, about 64 s left")
    view.end()
    assert shown(stream.getvalue()) == ["sweep: 4/20, 16 s, about 64 s left", ""]


def test_after_a_rollback_the_rest_is_estimated_anew() -> None:
    stream, clock = Terminal(), Clock()
    view = LogView(stream, clock)
    for step, wait_s in ((50, 10), (60, 10), (20, 10), (25, 0)):
        view(STEP.format(step))
        clock.sleep(wait_s)
    view.end()
    assert "130 s left  step 25/90" in shown(stream.getvalue())[0]


def test_without_progress_nothing_is_drawn_again() -> None:
    stream = Terminal()
    view = LogView(stream)
    view("one")
    view.end()
    assert stream.getvalue() == "one\n"
