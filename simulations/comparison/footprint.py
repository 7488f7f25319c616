"""LayerCheck's storage at three thresholds on several data sets: the paper's table 2.

K is a multiple of the learning rate, the unit in which layers move under Adam, and the same on all data sets:
calibration would hide how they differ. The paper's K = 1e-3 at a rate of 1e-5 is 100 of it.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.config import load_config
from app.measure import regime
from app.measure.timed_runs import TimedRuns
from layercheck.errors import ConfigError, LayerCheckError
from simulations.comparison.arms import Arm
from simulations.comparison.block import Block
from simulations.comparison.read import read_block
from simulations.comparison.result import table

FORMAT_VERSION = 1
K_PER_LR = (5.0, 10.0, 20.0)
BUNDLED = "bundled"
_SETTLE = 10
_WINDOW, _QUICK_WINDOW = 200, 60


@dataclass(frozen=True, slots=True)
class Footprint:
    """One run.

    Attributes:
        data: name of the data set.
        k_per_lr: threshold / learning rate.
        steps: measured ones.
        bytes_written, events, layer_writes: in them, full events aside.
        mean_event_bytes: 0 without an event.
        mean_interval: in steps, 0 if nothing was written.
        footprint_bytes: in the storage at the end.
        full_bytes: of one full state.
    """

    data: str
    k_per_lr: float
    steps: int
    bytes_written: int
    events: int
    mean_event_bytes: float
    layer_writes: int
    mean_interval: float
    footprint_bytes: int
    full_bytes: int

    @classmethod
    def of(cls, data: str, k_per_lr: float, block: Block) -> "Footprint":
        """From the block of a run of LayerCheck.

        Raises:
            LayerCheckError: the block is of a run that was not measured to its end, or of another method.
        """
        written = block.written
        if written is None:
            raise LayerCheckError(
                f"{data}, K = {k_per_lr:g} lr: the block of arm {block.arm} ({block.method}) says nothing of "
                "what was written"
            )
        mean = written.nbytes / written.events if written.events else 0.0
        return cls(
            data,
            k_per_lr,
            written.steps,
            written.nbytes,
            written.events,
            mean,
            written.layer_writes,
            block.mean_interval,
            block.footprint_bytes,
            block.full_bytes,
        )


def data_sets(given: Sequence[str]) -> dict[str, str]:
    """Name -> source: `bundled`, and the files that were given, by their stems.

    Raises:
        ConfigError: a file is not there, or two have the same stem.
    """
    found = {BUNDLED: BUNDLED}
    for text in given:
        path = Path(text)
        if not path.is_file():
            raise ConfigError(f"--data {text}: there is no such file")
        if path.stem in found:
            raise ConfigError(f"--data {text}: a data set {path.stem!r} is there already")
        found[path.stem] = str(path.absolute())
    return found


def measure_footprint(
    out: Path, data: Mapping[str, str], quick: bool, size: str | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measures, writes `footprint.json` and `footprint.md`; returns the first.

    Args:
        out: a new folder.
        data: of `data_sets`.
        quick: shorter runs.
        size: of the model, of `regime.SIZES`; None for `small`.
        say: is told of each run.

    Raises:
        LayerCheckError: a run failed.
        ConfigError: `out` is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"out={out} is not empty: give a new folder")
    out.mkdir(parents=True, exist_ok=True)
    size = size or "small"
    found = []
    config = out / "config.yaml"
    config.write_text(json.dumps(regime.config(str(out.absolute()), "layer", 1, size).resolved()))
    with TimedRuns(str(config.absolute())) as runs:
        for name, source in data.items():
            for k, arm in k_arms(quick).items():
                block = _run(runs, config, out / "runs" / f"{name}-{arm.name}", arm, name, source)
                found.append(Footprint.of(name, k, block))
                say(f"{name}, K = {k:g} lr: {found[-1].mean_interval:.1f} steps between versions")
    content = {"format_version": FORMAT_VERSION, "size": size, "runs": [asdict(each) for each in found]}
    (out / "footprint.json").write_text(json.dumps(content, indent=2) + "\n")
    (out / "footprint.md").write_text("\n".join(footprint_table(found)) + "\n")
    return content


def k_arms(quick: bool) -> dict[float, Arm]:
    """K / learning rate -> the run at this threshold."""
    return {k: _arm(k, _QUICK_WINDOW if quick else _WINDOW) for k in K_PER_LR}


def _arm(k_per_lr: float, window: int) -> Arm:
    settings = (
        "checkpoint.method=layercheck",
        "train.schedule=constant",
        "train.lr_warmup_steps=2",
        f"checkpoint.settings.warmup_steps={_SETTLE}",
        f"checkpoint.settings.warmup_full_every={_SETTLE}",
        f"checkpoint.settings.k0_per_lr={k_per_lr}",
        f"checkpoint.settings.s_max={window}",
        "checkpoint.settings.embedding_factor=1",
    )
    return Arm(f"k{k_per_lr:g}", "layercheck", (), settings, _SETTLE, window)


def _run(runs: TimedRuns, config: Path, folder: Path, arm: Arm, name: str, source: str) -> Block:
    data = (f"data.source={source}", f"data.cache={folder.parent.parent / 'data' / name}")
    settings = (*arm.settings, *data, f"train.steps={arm.steps}")
    load_config(str(config), settings)  # a wrong file is one error here; from the ranks it is a traceback
    block = read_block(arm, 0, runs.run(folder.absolute(), folder.name, settings, arm.steps), 0.0)
    shutil.rmtree(folder / "storage")
    return block


def footprint_table(found: Sequence[Footprint]) -> list[str]:
    """Lines of Markdown."""
    head = (
        "data",
        "K / lr",
        "steps",
        "GB",
        "events",
        "MB / event",
        "layer writes",
        "interval",
        "stored (GB)",
    )
    body = [
        (
            one.data,
            f"{one.k_per_lr:g}",
            f"{one.steps}",
            f"{one.bytes_written / 1e9:.3f}",
            f"{one.events}",
            f"{one.mean_event_bytes / 1e6:.2f}",
            f"{one.layer_writes}",
            f"{one.mean_interval:.1f}",
            f"{one.footprint_bytes / 1e9:.3f}",
        )
        for one in found
    ]
    return table(head, body)
