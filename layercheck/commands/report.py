"""`layercheck report`: one self-contained page about a run."""

import os
from pathlib import Path

from layercheck.commands.answer import Answer, size
from layercheck.commands.store import Store
from layercheck.errors import ConfigError
from layercheck.report.data import gather
from layercheck.report.page import page


def report(store: Store, out: str) -> Answer:
    """Writes the page.

    Raises:
        ConfigError: it cannot be written there.
    """
    text = page(gather(store.layercheck, store.run, store.facts()))
    target = Path(out)
    temp = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temp.write_text(text, encoding="ascii")
        temp.replace(target)  # whoever has the old page open never sees half of the new one
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise ConfigError(f"--out {out}: {error.strerror or error}", path=out) from error
    return Answer({"out": out, "nbytes": len(text)}, f"wrote {out} ({size(len(text))})")
