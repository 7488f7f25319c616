"""Runs all blocks of a comparison and writes what they came to.

After each block `blocks.json` holds all so far: a failure of a later one costs none of them, `--resume` runs
what is missing. What a block stored is deleted once it was read: the full states of all would fill a disk.
"""

import json
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from app.config import load_config
from app.measure import regime
from app.measure.timed_runs import WORLD_SIZE, TimedRuns
from layercheck.errors import ConfigError
from simulations.comparison import arms, figures
from simulations.comparison.arms import FULL, QUICK, Arm, Length
from simulations.comparison.as_costs import costs_of
from simulations.comparison.block import Block
from simulations.comparison.pictures import draw
from simulations.comparison.read import read_block
from simulations.comparison.result import comparison, markdown

_FOR_ALL = (
    "train.schedule=constant",
    "train.lr_warmup_steps=2",
    "checkpoint.settings.metrics_flush_s=2",
    "cluster.max_failures=3",
    "report_every_s=5",
)
"""What all blocks share, beside the model and the data."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be measured, checked; `done` was measured before."""

    out: Path
    methods: tuple[str, ...]
    length: Length
    seed: int
    quick: bool
    size: str
    done: tuple[Block, ...] = ()

    @property
    def key(self) -> dict[str, Any]:
        """What has to be the same for blocks to belong together; more rounds may follow."""
        of_a_block = replace(self.length, rounds=0, kill_rounds=0)
        return {
            "methods": list(self.methods),
            "length": asdict(of_a_block),
            "seed": self.seed,
            "size": self.size,
        }


def order_of(
    out: Path,
    methods: Sequence[str],
    quick: bool,
    seed: int,
    resume: bool = False,
    rounds: int | None = None,
    size: str | None = None,
) -> Order:
    """Checks what was asked for.

    Args:
        out: folder of the results.
        methods: of `arms.METHODS`.
        quick: short blocks.
        seed: of the order of the blocks.
        resume: take over what was measured there before.
        rounds: blocks of each arm, without a kill and with one; None for as many as `quick` says.
        size: of the model, of `regime.SIZES`; None for `large`, with `quick` `small`.

    Raises:
        ConfigError: there is no such method, the folder is not empty, or it holds another order.
    """
    length = QUICK if quick else FULL
    if rounds is not None:
        if rounds < 1:
            raise ConfigError(f"--rounds {rounds} must be at least 1")
        length = replace(length, rounds=rounds, kill_rounds=rounds)
    size = size or ("small" if quick else "large")
    order = Order(out, arms.check_methods(methods), length, seed, quick, size)
    if resume:
        return replace(order, done=_read_blocks(order))
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"out={out} is not empty: give a new folder, or --resume to run what is missing")
    return order


def _read_blocks(order: Order) -> tuple[Block, ...]:
    path = order.out / "blocks.json"
    try:
        content = json.loads(path.read_text())
        before, blocks = content["order"], tuple(Block.of(each) for each in content["blocks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--resume: {path} cannot be read ({error!r}): begin anew in a new folder"
        ) from None
    for name, value in order.key.items():
        if before.get(name) != value:
            raise ConfigError(f"--resume: {path} is of {name}={before.get(name)!r}, asked for is {value!r}")
    return blocks


def measure_methods(order: Order, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures, writes `costs.json`, `comparison.json`, `comparison.md` and pictures; returns the second.

    Raises:
        LayerCheckError: a run failed.
    """
    order.out.mkdir(parents=True, exist_ok=True)
    config = _write_config(order)
    blocks = list(order.done)
    with TimedRuns(config) as runs:
        interval = _Blocks(order, runs, blocks, say).all()
    return write_results(order, blocks, interval)


class _Blocks:
    """Runs the passes one after the other."""

    def __init__(
        self, order: Order, runs: TimedRuns, blocks: list[Block], say: Callable[[str], None]
    ) -> None:
        self._order, self._runs, self._blocks, self._say = order, runs, blocks, say
        self._known = {(block.arm, block.number) for block in blocks}
        self._num = self._total = 0

    def all(self) -> int:
        """Returns the interval, in steps, at which recoveries were compared."""
        order = self._order
        by_name = {arm.name: arm for arm in arms.steady_arms(order.methods, order.length)}
        steady = list(by_name)
        killed = [f"{method}-killed" for method in order.methods]
        first, *later = arms.passes(order.length, steady, killed, order.seed)
        self._total = len(first) + sum(len(each) for each in later)
        self._pass(first, by_name)
        interval = figures.matched_interval(self._blocks)
        by_name |= {arm.name: arm for arm in arms.killed_arms(order.methods, order.length, interval)}
        for each in later:
            self._pass(each, by_name)
        return interval

    def _pass(self, names: Sequence[tuple[str, int]], by_name: dict[str, Arm]) -> None:
        for name, number in names:
            self._num += 1
            if (name, number) not in self._known:
                self._blocks.append(self._block(by_name[name], number))
                self._write()

    def _write(self) -> None:
        """Whole or not at all: an interrupted write would cost all blocks before it."""
        content = {"order": self._order.key, "blocks": [block.content() for block in self._blocks]}
        path = self._order.out / "blocks.json"
        path.with_suffix(".tmp").write_text(json.dumps(content, indent=1) + "\n")
        path.with_suffix(".tmp").replace(path)

    def _block(self, arm: Arm, number: int) -> Block:
        name = f"{arm.name}-{number}"
        folder = self._order.out / "blocks" / name
        shutil.rmtree(folder, ignore_errors=True)  # what a run left that did not end
        t_iter_s = figures.step_time(self._blocks).value if arm.kill_step is not None else 0.0
        run = self._runs.run(folder, name, (*arm.settings, f"train.steps={arm.steps}"), 2 * arm.steps)
        block = read_block(arm, number, run, t_iter_s)
        shutil.copy(run.folder / "summary.json", folder / "summary.json")
        shutil.rmtree(folder / "storage")
        self._say(f"{self._num}/{self._total} {name}: {_in_words(block)}")
        return block


def _in_words(block: Block) -> str:
    if block.recovered is not None:
        return f"recovered in {block.recovered.total_s:.1f} s"
    return f"{block.cycle_s:.3f} s a step, stall {1000 * sum(block.stall_s) / len(block.stall_s):.1f} ms"


def _write_config(order: Order) -> str:
    """The configuration of all blocks as a file; methods and lengths are laid over it."""
    path = order.out / "config.yaml"
    content = regime.config(str(order.out.absolute()), "layer", 1, order.size).resolved()
    # As JSON, which is YAML too.
    path.write_text(json.dumps(content))
    content = load_config(str(path), _FOR_ALL).resolved()
    # The warm-up of the regime is not that of these blocks; each arm gives its own.
    content["checkpoint"]["settings"] = _limits(content["checkpoint"]["settings"])
    path.write_text(json.dumps(content, indent=1) + "\n")
    for arm in arms.steady_arms(order.methods, order.length):
        load_config(str(path), (*arm.settings, f"train.steps={arm.steps}"))
    return str(path.absolute())


def _limits(settings: dict[str, Any]) -> dict[str, Any]:
    """LayerCheck's settings that say nothing of when it writes: those that all methods heed."""
    return {key: settings[key] for key in ("metrics_flush_s", "storage_wait_s", "hang_s")}


# ---------------------------------------------------------------- results


def write_results(order: Order, blocks: Sequence[Block], interval: int) -> dict[str, Any]:
    """Writes every result; returns the content of `comparison.json`."""
    about = _about(order, blocks)
    content = comparison(blocks, interval, about)
    (order.out / "comparison.json").write_text(json.dumps(content, indent=2) + "\n")
    (order.out / "comparison.md").write_text(markdown(content))
    costs = costs_of(
        blocks,
        figures.regime(blocks, "own"),
        figures.regime(blocks, "every_step"),
        figures.recoveries(blocks),
        figures.step_time(blocks),
        about["machine"],
        about["model"],
    )
    (order.out / "costs.json").write_text(costs.model_dump_json(indent=2) + "\n")
    draw(content, order.out)
    return content


def _about(order: Order, blocks: Sequence[Block]) -> dict[str, Any]:
    full_bytes = max(block.full_bytes for block in blocks)
    parameters = full_bytes / figures.FULL_BYTES_PER_PARAMETER
    cores = len(os.sched_getaffinity(0))
    return {
        "machine": f"{platform.platform()}, {cores} cores, {_memory_gb():.0f} GB",
        "parameters": round(parameters),
        "model": f"{parameters / 1e6:.1f} M parameters on {WORLD_SIZE} ranks, ZeRO-3, bf16",
        "seed": order.seed,
        "quick": order.quick,
        "size": order.size,
        "length": asdict(order.length),
        "blocks": len(blocks),
        "load_1min": os.getloadavg()[0],
    }


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
