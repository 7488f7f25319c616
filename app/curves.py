"""The curves of a run for TensorBoard and Weights & Biases; rank 0 writes them, step by step."""

import logging
import os
from pathlib import Path
from typing import Any, Protocol, Self

from app.config import Config
from layercheck.errors import ConfigError
from layercheck.redact import without_secrets

log = logging.getLogger("app")


class _Sink(Protocol):
    def scalars(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Curves:
    """Hands the numbers of each step to every sink; they are opened at the first one."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._sinks: list[_Sink] | None = None

    @classmethod
    def of(cls, config: Config, rank: int) -> Self | None:
        """Those of a run that wants any."""
        wanted = config.logging.tensorboard or config.logging.wandb is not None
        return cls(config) if wanted and rank == 0 else None

    def note(self, step: int, values: dict[str, float]) -> None:
        """Adds the numbers of one step."""
        if self._sinks is None:
            self._sinks = _open(self._config, step)
        for sink in self._sinks:
            sink.scalars(step, values)

    def close(self) -> None:
        """Writes out what is buffered."""
        for sink in self._sinks or ():
            sink.close()
        self._sinks = None


def check_curves(config: Config) -> None:
    """Finds a missing package before anything starts.

    Raises:
        ConfigError: names the setting and the package.
    """
    if config.logging.tensorboard:
        _summary_writer()
    if config.logging.wandb is not None:
        _wandb(config.logging.wandb)


def _open(config: Config, step: int) -> list[_Sink]:
    sinks: list[_Sink] = []
    if config.logging.tensorboard and "://" in config.run.folder:
        log.warning("logging.tensorboard: run.storage=%r is no local folder, no events", config.run.storage)
    elif config.logging.tensorboard:
        sinks.append(_TensorBoard(Path(config.run.folder) / "tensorboard", step))
    if config.logging.wandb is not None:
        sinks.append(_WandB(config, config.logging.wandb))
    return sinks


class _TensorBoard:
    """One more events file for each life of a run; what an earlier one wrote of later steps is hidden."""

    def __init__(self, folder: Path, step: int) -> None:
        self._writer = _summary_writer()(logdir=str(folder), purge_step=step)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """All lives of a run are one run there, by its name."""

    def __init__(self, config: Config, project: str) -> None:
        self._run = _wandb(project).init(
            project=project,
            id=config.run.name,
            name=config.run.name,
            resume="allow",
            config=without_secrets(config.resolved(), os.environ),
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def _summary_writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"logging.tensorboard=true needs the package tensorboardX ({error}): install it, or set false"
        ) from None
    return SummaryWriter


def _wandb(project: str) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"logging.wandb={project!r} needs the package wandb ({error}): pip install 'layercheck[wandb]', "
            "or set null"
        ) from None
    return wandb
