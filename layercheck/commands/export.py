"""`layercheck export`: the composite as a checkpoint that others read, and nothing of ours is needed to."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layercheck.commands.answer import Answer, number, size
from layercheck.commands.plan import PlanOptions, notes_of, planned
from layercheck.commands.store import Store
from layercheck.coordination.facts import StoreFacts
from layercheck.errors import ConfigError, NoPlanError
from layercheck.groups import OptimizerGroup, regrouped, stock_groups
from layercheck.manifest import BadShard, RecoveryPlan, RunRecord

if TYPE_CHECKING:
    from layercheck.export.composite import Composite

Write = Callable[["Composite", Path], tuple[str, ...]]
"""Writes a composite into an empty folder; returns what a person should know."""
_TRIES = 20


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The flags; None where one was not given. `to` is `deepspeed` or `hf`."""

    to: str
    out: str
    at_step: int | None = None
    dtype: str | None = None
    groups: str | None = None
    world_size: int | None = None
    sub_group_size: int | None = None


def export(store: Store, options: ExportOptions) -> Answer:
    """Writes the checkpoint; `--out` holds all of it or nothing.

    Raises:
        ConfigError: flags contradict each other, `--out` is in use, or that format cannot say the run.
        NoPlanError: the store yields no plan (of that step).
    """
    _refuse_flags(options)
    out = _free_folder(options.out)
    facts = store.facts()
    _refuse_hashes(options, facts.run)
    write = _writer_of(options, facts)
    temp = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        made, notes, bad = _write_until_whole(store, options, write, temp)
        nbytes = sum(path.stat().st_size for path in temp.rglob("*") if path.is_file())
        _publish(temp, out)
    except OSError as error:  # the store raises errors of its own: this is the folder
        raise ConfigError(f"--out {options.out}: {error.strerror or error}", path=options.out) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    notes += tuple(f"{shard.file} is bad, an older {shard.layer} was taken: {shard.error}" for shard in bad)
    return Answer(_value(made, options, nbytes), _text(made, options, nbytes), notes=notes)


def _refuse_flags(options: ExportOptions) -> None:
    foreign: dict[str, dict[str, str | int | None]] = {
        "hf": {
            "--groups": options.groups, "--world-size": options.world_size,
            "--sub-group-size": options.sub_group_size,
        },
        "deepspeed": {"--dtype": options.dtype},
    }  # fmt: skip
    for flag, value in foreign[options.to].items():
        if value is not None:
            raise ConfigError(f"{flag} {value} means nothing with --to {options.to}: leave it out", flag=flag)


def _refuse_hashes(options: ExportOptions, run: RunRecord) -> None:
    hashed = [layer.name for layer in run.layer_map.layers if layer.name in run.frozen_hashes]
    if hashed:
        raise ConfigError(
            f"--to {options.to}: of layer {hashed[0]} the store of {run.name} holds a hash alone "
            "(frozen='source'), so no whole model can be written from it; the app hands one over at the end "
            "of a run (export)",
            layer=hashed[0],
        )


def _free_folder(name: str) -> Path:
    out = Path(name).expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {name} exists and is not empty: name another folder", path=name)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {name}: {error.strerror or error}", path=name) from error
    return out


def _writer_of(options: ExportOptions, facts: StoreFacts) -> Write:
    # torch is loaded here, since no other command needs it.
    if options.to == "hf":
        from layercheck.export.hf_files import write_hf

        return lambda composite, folder: write_hf(composite, folder, options.dtype or "float32")
    from layercheck.export.zero_files import SUB_GROUP_SIZE, write_zero

    groups = _groups(options.groups or "layer", facts)
    sub_group_size = options.sub_group_size or SUB_GROUP_SIZE
    return lambda composite, folder: write_zero(
        composite, folder, groups, composite.plan.world_size, sub_group_size
    )


def _groups(choice: str, facts: StoreFacts) -> tuple[OptimizerGroup, ...]:
    run = facts.run
    if not run.optimizer_groups:
        raise ConfigError(
            f"--to deepspeed: run.json of {run.name} names no optimizer groups, it is of an earlier version: "
            "use --to hf",
            run=run.name,
        )
    if choice == "layer":
        return run.optimizer_groups
    if choice == "stock":
        return stock_groups(run.optimizer_groups, run.layer_map)
    return regrouped(run.optimizer_groups, _read_groups(choice))


def _read_groups(path: str) -> list[dict[str, Any]]:
    try:
        wanted = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--groups {path}: neither layer nor stock nor a JSON file: {error}") from error
    if not isinstance(wanted, list) or not all(isinstance(group, dict) for group in wanted):
        raise ConfigError(f'--groups {path}: needs a list such as [{{"names": ["model.norm.weight"]}}, ...]')
    return wanted


# ---------------------------------------------------------------- writing


def _write_until_whole(
    store: Store, options: ExportOptions, write: Write, temp: Path
) -> tuple[RecoveryPlan, tuple[str, ...], tuple[BadShard, ...]]:
    """Plans and writes; a bad shard begins it anew without that version. A living run collects meanwhile."""
    from layercheck.export.composite import BadShardError, Composite

    bad: tuple[BadShard, ...] = ()
    asked = PlanOptions(at_step=options.at_step, world_size=options.world_size)
    while True:
        facts = store.facts()
        made = planned(replace(facts, bad=facts.bad + bad), asked)
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir()
        try:
            notes = write(Composite(store.layercheck, facts.run, made), temp)
            return made, facts.notes + notes_of(made, asked) + notes, bad
        except BadShardError as error:
            bad += (error.shard,)
            if len(bad) == _TRIES:
                raise NoPlanError(f"{_TRIES} shards of the plan were bad: {error}; see verify") from error


def _publish(temp: Path, out: Path) -> None:
    """Every byte is on the disk before the folder has its name; a crash leaves a folder named `.*.tmp`."""
    for path in [*temp.rglob("*"), temp]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    temp.rename(out)  # onto an empty folder, if there is one


# ---------------------------------------------------------------- what it says


def _value(made: RecoveryPlan, options: ExportOptions, nbytes: int) -> dict[str, Any]:
    return {
        "to": options.to,
        "out": options.out,
        "step": made.resume_step - 1,
        "mode": made.mode,
        "max_age": made.max_age,
        "weighted_age": made.weighted_age,
        "nbytes": nbytes,
    }


def _text(made: RecoveryPlan, options: ExportOptions, nbytes: int) -> str:
    way = {
        "hf": f'AutoModelForCausalLM.from_pretrained("{options.out}")',
        "deepspeed": f'engine.load_checkpoint("{options.out}") on {made.world_size} ranks, or '
        f"python -m deepspeed.utils.zero_to_fp32 {options.out} OUTPUT_DIR",
    }
    return (
        f"wrote {options.out} ({size(nbytes)}): step {made.resume_step - 1}, {made.mode}, oldest layer "
        f"{made.max_age} steps, size-weighted age {number(made.weighted_age)}\nread it with {way[options.to]}"
    )
