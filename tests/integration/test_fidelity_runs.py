"""A minute model is fine-tuned, fails and recovers: what the fidelity experiments are made of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.measure.fidelity.spec import Length, RunSpec
from tests.harness import run_ranks

pytestmark = pytest.mark.slow
LENGTH = Length(base_steps=1, steps=24, every=6, last_every=1, num_last=3, train_rows=60, held_out_rows=8)
CHECKPOINT: dict[str, Any] = {
    "warmup_steps": 6, "warmup_full_every": 3, "target_interval": 4, "s_max": 16, "full_every": 0,
    "embedding_factor": 1, "failure_aware": False, "metrics_flush_s": 5,
}  # fmt: skip
SHAPE = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip


def _spec(**more: Any) -> RunSpec:
    return RunSpec(seed=1, length=LENGTH, checkpoint=CHECKPOINT, **more)


def prepare(folder: str) -> Path:
    """Puts a minute base model in the place of one that would have to be trained; returns its folder."""
    from app.measure.fidelity import regime, tuning

    regime.MODELS["llama"] = {"config": SHAPE, "vocab_size": 300}
    base = Path(folder) / "base"
    if not base.is_dir():
        _save_base(regime.base_config(Path(folder), "llama", LENGTH), base)
    tuning.base_model = lambda *_: base
    return base


def _save_base(config: Any, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from app.data import load_tokenizer

    config.data_folder.mkdir(parents=True)
    tokenizer = load_tokenizer(config, config.data_folder)
    torch.manual_seed(0)
    shape = AutoConfig.for_model(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SHAPE)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)


JUST_SAVED = {"warmup_steps": 14, "warmup_full_every": 2}
"""The failure comes right after the full event that ends the warm-up: all ages are 0."""


OLDER = {"target_interval": 8, "s_max": 32}


def _runs(folder: str) -> dict[str, Any]:
    """Every kind of run on one base model."""
    from app.measure.fidelity import tuning

    prepare(folder)
    names = {
        "free": _spec(),
        "recovered": _spec(failures=(14, 19)),
        "zero": _spec(failures=(14, 19), moment="zero"),
        "scale": _spec(failures=(14,), moment="scale"),
        "scout": _spec().model_copy(update={"checkpoint": CHECKPOINT | OLDER}),
        "fresh": _spec(failures=(14,)).model_copy(update={"checkpoint": CHECKPOINT | JUST_SAVED}),
    }
    begun_with: list[Any] = []
    treated: list[Any] = []
    loaders: list[Any] = []
    open_session, treat_moments = tuning.open_session, tuning.treat_moments

    def noting(job: Any, *args: Any) -> Any:
        begun_with.append(job.engine.optimizer.fp32_partitioned_groups_flat[0].detach().numpy().copy())
        loaders.append(job.loader)  # kept: a thread ends by itself once nobody holds its executor
        return open_session(job, *args)

    def treating(engine: Any, ages: Any, how: Any) -> None:
        before = _adam(engine)
        treat_moments(engine, ages, how)
        treated.append((how, ages, before, _adam(engine)))

    tuning.open_session, tuning.treat_moments = noting, treating
    outcomes = tuning.run_specs(0, folder, list(names.values()), False)
    # One life of `free`, then the three of `recovered`.
    texts = Path(folder) / f"texts-{LENGTH.train_rows}-{LENGTH.held_out_rows}"
    return dict(zip(names, outcomes, strict=True)) | {
        "begun with": begun_with[1:4], "texts": texts, "treated": treated, "reading": _still_read(loaders)
    }  # fmt: skip


def _adam(engine: Any) -> list[tuple[str, dict[str, Any]]]:
    """(layer, flat tensors by their names) of each sub-group, from DeepSpeed's own books."""
    zero = engine.optimizer
    return [
        (
            zero.param_groups[zero.sub_group_to_group_id[index]]["layer"],
            {key: zero.optimizer.state[flat][key].numpy().copy() for key in ("exp_avg", "exp_avg_sq")}
            | {"fp32": flat.detach().numpy().copy()},
        )
        for index, flat in enumerate(zero.fp32_partitioned_groups_flat)
    ]


def _still_read(loaders: list[Any]) -> list[str]:
    """Threads of data that live on."""
    import threading

    assert loaders
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("data")]
    for thread in threads:
        thread.join(1)
    return [thread.name for thread in threads if thread.is_alive()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tmp = tmp_path_factory.mktemp("fidelity")
    found: dict[str, Any] = run_ranks(1, tmp, _runs, str(tmp))[0]
    return found


def test_a_run_goes_on_from_its_composite(runs: dict[str, Any]) -> None:
    assert [recovery.step for recovery in runs["recovered"].recoveries] == [14, 19]
    recovery, _ = runs["recovered"].recoveries
    assert 0 < recovery.weighted_age <= recovery.max_age <= CHECKPOINT["s_max"]
    # Neither the other model's weights in some layer, nor the lost state found again.
    assert recovery.loss_after != recovery.loss_before
    assert recovery.loss_after == pytest.approx(recovery.loss_before, rel=0.02)
    assert len(runs["recovered"].weighted_age) == LENGTH.steps


def test_until_the_failure_the_runs_are_one_and_then_they_are_not(runs: dict[str, Any]) -> None:
    free, recovered = dict(runs["free"].evaluations), dict(runs["recovered"].evaluations)
    assert [free[step] for step in (0, 6, 12)] == [recovered[step] for step in (0, 6, 12)]
    assert free[24] != recovered[24]
    assert free[24] < free[0]


def test_a_recovery_without_age_changes_nothing(runs: dict[str, Any]) -> None:
    (recovery,) = runs["fresh"].recoveries
    assert recovery.max_age == 0
    assert recovery.loss_after == recovery.loss_before
    assert runs["fresh"].evaluations == runs["free"].evaluations


def test_other_settings_train_bit_for_bit_alike_until_something_fails(runs: dict[str, Any]) -> None:
    assert runs["scout"].evaluations == runs["free"].evaluations
    assert runs["scout"].weighted_age != runs["free"].weighted_age
    assert runs["scout"].accuracy == runs["free"].accuracy


def test_stale_first_moments_are_dropped_or_not_and_the_weights_stay(runs: dict[str, Any]) -> None:
    keep, zero = runs["recovered"].recoveries[0], runs["zero"].recoveries[0]
    assert zero.loss_after == keep.loss_after
    assert dict(runs["zero"].evaluations)[24] != dict(runs["recovered"].evaluations)[24]


@pytest.mark.parametrize(
    ("how", "left"), [("keep", lambda age: 1.0), ("scale", lambda age: 0.9**age), ("zero", lambda age: 0.0)]
)
def test_each_layers_first_moment_is_treated_by_its_own_age(
    runs: dict[str, Any], how: str, left: Callable[[int], float]
) -> None:
    treated = [one for one in runs["treated"] if one[0] == how]
    assert any(len(set(ages.values())) > 1 for _, ages, _, _ in treated)
    for _, ages, before, after in treated:
        assert {layer for layer, _ in before} == set(ages)
        for (layer, old), (_, new) in zip(before, after, strict=True):
            assert np.abs(old["exp_avg"]).max() > 0
            np.testing.assert_allclose(new["exp_avg"], old["exp_avg"] * left(ages[layer]), rtol=1e-6)
            assert all((new[key] == old[key]).all() for key in ("exp_avg_sq", "fp32"))


def test_no_life_of_a_run_leaves_its_reading_thread_behind(runs: dict[str, Any]) -> None:
    assert runs["reading"] == []


def test_the_next_life_has_another_model_before_it_recovers(runs: dict[str, Any]) -> None:
    first, *later = runs["begun with"]
    assert len(later) == 2
    assert all(np.abs(weights - first).mean() > 1e-3 for weights in later)
    assert np.abs(later[0] - later[1]).mean() > 1e-3


def test_what_is_evaluated_was_never_trained_on(runs: dict[str, Any]) -> None:
    train, held_out, choices = (
        _rows(runs["texts"] / f"{name}.jsonl") for name in ("train", "held-out", "choices")
    )
    assert (len(train), len(held_out)) == (LENGTH.train_rows, LENGTH.held_out_rows)
    assert not {answer for _, answer in train} & {answer for _, answer in held_out}
    assert len(choices) == 8 * len(held_out)
    for number, (question, answer) in enumerate(held_out):
        asked, unasked = choices[8 * number : 8 * number + 4], choices[8 * number + 4 : 8 * number + 8]
        assert {one for one, _ in asked} == {question}
        assert question not in {one for one, _ in unasked}
        assert [one for _, one in asked] == [one for _, one in unasked]
        assert asked[0][1] == answer
        assert len({one for _, one in asked}) == 4


def _rows(path: Path) -> list[tuple[str, str]]:
    turns = [json.loads(line)["conversations"] for line in path.read_text().splitlines()]
    return [(question["value"], answer["value"]) for question, answer in turns]
