"""LayerCheck under the Hugging Face Trainer: a mixin that knows when, a callback that knows what.

    class MyTrainer(LayerCheckTrainerMixin, transformers.Trainer):
        pass

    protect = LayerCheckCallback(storage="/shared/runs", run="my-run")
    MyTrainer(model, args, train_dataset=data, callbacks=[protect]).train()

Where a run stands is known only once the engine exists and the coordinator has answered, but Trainer asks
before it builds the engine. So the mixin builds it first. The order of one `train()`:

1. `_inner_training_loop` makes an empty folder and passes it off as the checkpoint to resume from.
2. `_init_training_state` has the engine built, attaches and resumes the session, and writes a minimal
   `trainer_state.json` into the folder. Trainer reads it and skips the consumed batches by itself.
3. `_prepare_for_training` hands out the engine of (2): nothing is loaded from the folder.
4. `on_step_end` calls `after_step`; `on_train_end` takes a full event and closes; an error closes too.

Without the callback the mixin only groups the optimizer's parameters by layer: that is the off switch.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from layercheck.errors import ConfigError, EngineRefusedError, FencedError
from layercheck.model_facts import tokenizer_files
from layercheck.receipt import ResumePoint
from layercheck.session import RngPolicy, Session, attach
from layercheck.zero3 import layer_groups

log = logging.getLogger(__name__)
STATE_FILE = "trainer_state.json"
_KEPT = (
    "global_step", "epoch", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip
"""What of Trainer's own state rides with every step; its log history does not, it would grow for ever."""
_HOOKS = ("_inner_training_loop", "_init_training_state", "_prepare_for_training")
_FOREIGN_GROUPS = ("params", "model", "optimizer_dict")
"""Optimizers that come with one of these bring their own groups (GaLore, LOMO)."""


class LayerCheckCallback(TrainerCallback):
    """Holds the session of one `Trainer`. Give it to a trainer that has `LayerCheckTrainerMixin`.

    Args:
        storage: folder or URI that every rank sees.
        run: name of the run; the same name continues it.
        config: settings, or their dict.
        rng: Trainer's dropout draws from the global generators, so their states are kept.
        **attach_arguments: what else `layercheck.attach` takes (`coordinator`, `submission`, `takeover`,
            `run_info`).
    """

    def __init__(
        self,
        storage: str,
        run: str,
        config: dict[str, Any] | None = None,
        rng: RngPolicy = "captured",
        **attach_arguments: Any,
    ) -> None:
        self._arguments = {"storage": storage, "run": run, "config": config, "rng": rng, **attach_arguments}
        self._session: Session | None = None
        self._losses: list[Tensor] = []
        self._restore_at: str | None = None
        self._steps_run, self._preempted = 0, False
        self._keeps_scheduler = True
        self.point: ResumePoint | None = None

    @property
    def session(self) -> Session:
        """The open session."""
        assert self._session is not None, "the session opens when training begins"
        return self._session

    def open(self, engine: Any, scheduler: Any, tokenizer: Any = None) -> ResumePoint:
        """Attaches to the engine and recovers weights, moments, counters and learning rate. A collective."""
        arguments = dict(self._arguments)
        if hasattr(tokenizer, "save_pretrained"):
            arguments.setdefault("run_info", {"tokenizer_files": tokenizer_files(tokenizer)})
        self._session = attach(engine, **arguments)
        self.point = self._session.resume()
        self._steps_run, self._preempted = 0, False
        # A scheduler that DeepSpeed steps is part of the engine's state and is saved with that.
        self._keeps_scheduler = engine.lr_scheduler is None
        saved = self.point.trainer_state.get("hf_scheduler")
        if saved is not None:
            _set_scheduler(scheduler, saved)
        return self.point

    def resumed_at(self, is_mid_epoch: bool) -> None:
        """Says where the generators have to be put back.

        The data loader draws from them when an epoch begins. In an epoch that goes on those draws were made
        before the state was captured, so they come back after; in a new epoch they are still to come.
        """
        self._restore_at = "step" if is_mid_epoch else "epoch"

    def add_loss(self, loss: Tensor) -> None:
        """One micro-batch's loss, scaled as Trainer accumulates it."""
        self._losses.append(loss)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Before the data loader of the epoch begins."""
        self._restore_rng("epoch")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """After the batches of a step were fetched, before they are used."""
        self._restore_rng("step")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """After each optimizer step; raises what `Session.after_step` raises."""
        ours: dict[str, Any] = {"hf": {key: getattr(state, key) for key in _KEPT}}
        if self._keeps_scheduler:
            ours["hf_scheduler"] = kwargs["lr_scheduler"].state_dict()
        if self._losses:
            ours["loss"] = float(sum(self._losses))
        self._losses = []
        self._steps_run += 1
        if self.session.after_step(state.global_step, ours).preempted:
            self._preempted = control.should_training_stop = True

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """An evaluation makes no step; each of its batches shows that it does not hang."""
        if self._session is not None:
            self._session.watchdog.beat(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The store keeps the very last state, then the session is closed."""
        if self._steps_run and not self._preempted:
            self.session.save_now()
        self.close()

    def close(self, how: str = "completed", reason: str = "") -> None:
        """Ends the session if it is open."""
        if self._session is not None:
            self._session.close(how, reason)

    def _restore_rng(self, where: str) -> None:
        if self._restore_at == where:
            self._restore_at = None
            self.session.restore_rng()


class LayerCheckTrainerMixin:
    """Stands before `transformers.Trainer` among the bases; see the head of this file."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Trainer's optimizer with groups that mirror the layers.

        Raises:
            EngineRefusedError: the optimizer of `args.optim` brings groups of its own.
        """
        trainer: Any = self
        if trainer.optimizer is None:
            target = trainer.model if model is None else model
            kind, settings = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(
                trainer.args, target
            )
            if foreign := [key for key in _FOREIGN_GROUPS if key in settings]:
                raise EngineRefusedError(
                    f"optim={trainer.args.optim} brings its own parameter groups ({foreign[0]}): use one "
                    "that takes groups, such as adamw_torch",
                    optim=str(trainer.args.optim),
                )
            trainer.optimizer = kind(layer_groups(target, trainer.args.weight_decay), **settings)
        return trainer.optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Trainer's own, overheard for the loss."""
        loss: Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if (callback := _callback_of(self)) is not None:
            callback.add_loss(loss)
        return loss

    def _inner_training_loop(
        self, batch_size: Any = None, args: Any = None, resume_from_checkpoint: Any = None, **kwargs: Any
    ) -> Any:
        loop = super()._inner_training_loop  # type: ignore[misc]
        callback = _callback_of(self)
        if callback is None:
            return loop(batch_size, args, resume_from_checkpoint, **kwargs)
        if resume_from_checkpoint is not None:
            raise ConfigError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: LayerCheck resumes the run by its name; "
                "leave it out, or leave out LayerCheckCallback"
            )
        _check_hooks()
        with tempfile.TemporaryDirectory(prefix="layercheck-") as folder:
            try:
                return loop(batch_size, args, folder, **kwargs)
            except FencedError:
                callback.close("fenced")
                raise
            except BaseException as error:
                callback.close("failed", f"{type(error).__name__}: {error}")
                raise

    def _init_training_state(
        self, max_steps: int, per_epoch: int, num_epochs: int, folder: Any, trial: Any
    ) -> tuple[int, int]:
        start = super()._init_training_state  # type: ignore[misc]
        trainer: Any = self
        callback = _callback_of(self)
        if callback is None:
            return tuple(start(max_steps, per_epoch, num_epochs, folder, trial))
        model, _ = super()._prepare_for_training(max_steps, None, None)  # type: ignore[misc]
        self._prepared = model
        point = callback.open(trainer.deepspeed, trainer.lr_scheduler, trainer.processing_class)
        if point.step > 1:
            _write_state(trainer, Path(folder), max_steps, point)
        epochs, batches = start(max_steps, per_epoch, num_epochs, folder, trial)
        if trainer.state.global_step >= max_steps:
            # Trainer takes a step before it asks whether it is done.
            return num_epochs, 0
        if point.step > 1:
            callback.resumed_at(is_mid_epoch=batches > 0)
        return epochs, batches

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[Any, Any]:
        if _callback_of(self) is None:
            prepare = super()._prepare_for_training  # type: ignore[misc]
            return tuple(prepare(max_steps, train_dataloader, resume_from_checkpoint))
        trainer: Any = self
        trainer.callback_handler.train_dataloader = train_dataloader
        return self._prepared, train_dataloader


def _callback_of(trainer: Any) -> LayerCheckCallback | None:
    found = [item for item in trainer.callback_handler.callbacks if isinstance(item, LayerCheckCallback)]
    if len(found) > 1:
        raise ConfigError(f"{len(found)} LayerCheckCallbacks in one trainer: give it one")
    return found[0] if found else None


def _check_hooks() -> None:
    missing = [name for name in _HOOKS if not hasattr(Trainer, name)]
    if missing:
        raise EngineRefusedError(
            f"this version of transformers has no Trainer.{missing[0]}: use transformers>=5.20,<6",
            missing=missing,
        )


def _write_state(trainer: Any, folder: Path, max_steps: int, point: ResumePoint) -> None:
    """The least of a `trainer_state.json` that makes Trainer go on with the resume step."""
    saved = {key: value for key, value in point.trainer_state.get("hf", {}).items() if key in _KEPT}
    state: Any = TrainerState(**{**saved, "global_step": point.step - 1})
    state.train_batch_size = trainer._train_batch_size
    state.compute_steps(trainer.args, max_steps)
    state.save_to_json(str(folder / STATE_FILE))


def _set_scheduler(scheduler: Any, saved: dict[str, Any]) -> None:
    scheduler.load_state_dict(saved)
    for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
