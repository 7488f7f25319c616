"""`layercheck report`: one self-contained page about a run, or about two beside each other."""

import os
from pathlib import Path

from layercheck.commands.answer import Answer, size
from layercheck.commands.store import Store
from layercheck.errors import ConfigError
from layercheck.report.compare import Pair
from layercheck.report.data import RunReport, gather
from layercheck.report.page import page

_LOOKS = 4


def report(store: Store, out: str, against: Store | None = None) -> Answer:
    """Writes the page; with `against` that run is put beside it.

    Raises:
        ConfigError: it cannot be written there.
    """
    mine = _look(store)
    text = page(mine, None if against is None else _pair(mine, store, against))
    target = Path(out)
    temp = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temp.write_text(text, encoding="ascii")
        temp.replace(target)  # whoever has the old page open never sees half of the new one
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise ConfigError(f"--out {out}: {error.strerror or error}", path=out) from error
    return Answer({"out": out, "nbytes": len(text)}, f"wrote {out} ({size(len(text))})")


def _look(store: Store, span: int = 0) -> RunReport:
    return gather(store.layercheck, store.run, store.facts(), span)


def _pair(mine: RunReport, store: Store, against: Store) -> Pair:
    """Both with the columns of the longer one.

    Raises:
        ConfigError: a run grew at each look.
    """
    other = _look(against, mine.totals.steps)
    for _ in range(_LOOKS):
        if len(mine.curves.first) == len(other.curves.first) and mine.curves.width == other.curves.width:
            return Pair(mine, other)
        # The shorter one again; a run that trains meanwhile may have become the longer one.
        if mine.totals.steps < other.totals.steps:
            mine = _look(store, other.totals.steps)
        else:
            other = _look(against, mine.totals.steps)
    raise ConfigError(f"--against: a run grew while it was read, {_LOOKS} times: try again")
