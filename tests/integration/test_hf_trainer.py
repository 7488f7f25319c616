"""The real Hugging Face Trainer on two ranks: a kill, and what comes after is what would have come."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness import RankFailedError, run_ranks

STEPS, KILL_AT, WORLD = 36, 13, 2
VOCAB, SEQ, ROWS = 64, 12, 40
CONFIG = {
    "warmup_steps": 8, "warmup_full_every": 4, "s_max": 16, "target_interval": 5, "full_every": 0,
    "embedding_factor": 2,
}  # fmt: skip


def _data() -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def _model(seed: int) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def _arguments(folder: str, **changes: Any) -> Any:
    from transformers import TrainingArguments

    # The process group exists already; accelerate only wants to see where it would have been.
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29999"}
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 7,
        "deepspeed": {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 3, "sub_group_size": 5000},
        },
    }
    return TrainingArguments(**(settings | changes))


def run_trainer(
    folder: str,
    *,
    seed: int = 0,
    kill_at: int | None = None,
    save_at: int | None = None,
    protected: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    """Trains to the end, or to the kill; gives the token ids and losses that this rank saw, by step."""
    from transformers import Trainer, TrainerCallback

    from layercheck.integrations.hf import LayerCheckCallback, LayerCheckTrainerMixin

    seen: dict[int, list[list[int]]] = {}
    losses: dict[int, list[float]] = {}

    class Watched(LayerCheckTrainerMixin, Trainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            step = self.state.global_step + 1
            seen.setdefault(step, []).append(inputs["input_ids"].flatten().tolist())
            loss = super().training_step(model, inputs, *rest, **more)
            losses.setdefault(step, []).append(float(loss))
            return loss

    class Killer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates[state.global_step] = kwargs["lr_scheduler"].get_last_lr()[0]
            if state.global_step == save_at:
                protect.session.save_now()
            if state.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    rates: dict[int, float] = {}
    protect = LayerCheckCallback(f"{folder}/store", "run", CONFIG, submission="one")
    callbacks = [protect] if protected else []
    arguments = _arguments(f"{folder}/out", **changes)
    trainer = Watched(_model(seed), arguments, train_dataset=_data(), callbacks=[*callbacks, Killer()])
    result = trainer.train()
    receipt = protect.point.receipt.model_dump() if protect.point and protect.point.receipt else None
    return {
        "seen": seen, "losses": losses, "rates": rates, "receipt": receipt, "last": result.global_step,
        "epoch": trainer.state.epoch,
    }  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    tmp = tmp_path_factory.mktemp("reference")
    return run_ranks(WORLD, tmp, partial(run_trainer, protected=False), str(tmp))


def test_the_next_twenty_batches_after_a_kill_are_those_of_the_undisturbed_run(
    tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    assert run_ranks(WORLD, tmp_path, partial(run_trainer, kill_at=KILL_AT), str(tmp_path)) == [None, None]
    for rank, result in enumerate(run_ranks(WORLD, tmp_path, partial(run_trainer, seed=99), str(tmp_path))):
        first = result["receipt"]["resume_step"]
        assert 1 < first <= KILL_AT + 1
        assert min(result["seen"]) == first
        assert result["last"] == STEPS
        wanted = {step: reference[rank]["seen"][step] for step in range(first, first + 20)}
        assert {step: result["seen"][step] for step in wanted} == wanted
        assert result["rates"] == {step: reference[rank]["rates"][step] for step in range(first, STEPS + 1)}
        assert result["epoch"] == reference[rank]["epoch"]


@pytest.mark.parametrize("kill_at", [pytest.param(10, marks=pytest.mark.slow), 13])
def test_i10_after_a_fresh_save_losses_and_dropout_are_those_of_the_undisturbed_run(
    tmp_path: Path, reference: list[dict[str, Any]], kill_at: int
) -> None:
    """Step 10 ends an epoch (the data loader draws next), step 13 is in the middle of one."""
    die = partial(run_trainer, kill_at=kill_at, save_at=kill_at)
    assert run_ranks(WORLD, tmp_path, die, str(tmp_path)) == [None, None]
    for rank, result in enumerate(run_ranks(WORLD, tmp_path, partial(run_trainer, seed=99), str(tmp_path))):
        assert result["receipt"]["rng"] == f"captured at step {kill_at}"
        assert result["receipt"]["max_age"] == 0
        after = range(kill_at + 1, STEPS + 1)
        assert result["losses"] == {step: reference[rank]["losses"][step] for step in after}


def _run_twice(folder: str) -> Any:
    first = run_trainer(folder, max_steps=12)
    return first["last"], run_trainer(folder, seed=99, max_steps=12)


def test_a_run_that_is_complete_takes_no_further_step(tmp_path: Path) -> None:
    for last, again in run_ranks(WORLD, tmp_path, _run_twice, str(tmp_path)):
        assert (last, again["last"], again["seen"]) == (12, 12, {})


def _resume_from(folder: str) -> None:
    from transformers import Trainer

    from layercheck.integrations.hf import LayerCheckCallback, LayerCheckTrainerMixin

    class Ours(LayerCheckTrainerMixin, Trainer):
        pass

    protect = LayerCheckCallback(f"{folder}/store", "run", CONFIG)
    Path(folder, "trainer_state.json").write_text("{}")
    trainer = Ours(_model(0), _arguments(folder), train_dataset=_data(), callbacks=[protect])
    trainer.train(resume_from_checkpoint=folder)


def test_a_checkpoint_to_resume_from_beside_the_run_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"ConfigError: resume_from_checkpoint="):
        run_ranks(1, tmp_path, _resume_from, str(tmp_path))
