from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.config import TrainConfig
from app.order import Order, seed_everything
from app.schedule import lr_at
from layercheck.errors import ConfigError

ORDER = Order(num_sequences=50, global_batch=12, seed=7)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_the_global_batch_is_the_same_at_every_world_size(world_size: int) -> None:
    for step in (1, 4, 5, 9):
        parts = [ORDER.rank_indices(step, rank, world_size) for rank in range(world_size)]
        assert list(chain.from_iterable(parts)) == ORDER.step_indices(step)


def test_a_step_asked_for_out_of_turn_gives_the_same_sequences() -> None:
    in_turn = [ORDER.step_indices(step) for step in range(1, 20)]
    backwards = [Order(50, 12, 7).step_indices(step) for step in reversed(range(1, 20))]
    assert in_turn == backwards[::-1]


def test_each_epoch_uses_every_sequence_once_in_another_order() -> None:
    stream = [index for step in range(1, 26) for index in ORDER.step_indices(step)]
    epochs = [stream[first : first + 50] for first in range(0, 300, 50)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1]


@given(
    num_sequences=st.integers(5, 40),
    seed=st.integers(0, 99),
    lives=st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 4])), min_size=1, max_size=6),
)
def test_every_sequence_is_seen_once_an_epoch_whatever_dies_and_however_many_ranks_go_on(
    num_sequences: int, seed: int, lives: list[tuple[int, int]]
) -> None:
    """Each life runs some steps with its number of ranks and dies in the middle of the next one."""
    order, seen, step = Order(num_sequences, 12, seed), [], 1
    for steps, world_size in lives:
        for _ in range(steps):
            for rank in range(world_size):
                seen += order.rank_indices(step, rank, world_size)
            step += 1
        order.rank_indices(step, 0, world_size)  # begun, and lost with the life
    for first in range(0, len(seen), num_sequences):
        epoch = seen[first : first + num_sequences]
        assert len(set(epoch)) == len(epoch)
        assert len(epoch) < num_sequences or set(epoch) == set(range(num_sequences))


def test_another_seed_gives_another_order() -> None:
    assert Order(50, 12, 8).step_indices(1) != ORDER.step_indices(1)


def _draws(*key: int) -> tuple[float, float]:
    seed_everything(*key)
    return float(torch.rand(())), float(np.random.rand())


def test_random_numbers_depend_on_seed_step_rank_and_micro_batch_alone() -> None:
    first = _draws(1, 2, 3, 4)
    others = [_draws(9, 2, 3, 4), _draws(1, 9, 3, 4), _draws(1, 2, 9, 4), _draws(1, 2, 3, 9)]
    assert _draws(1, 2, 3, 4) == first
    assert all(mine != theirs for other in others for mine, theirs in zip(other, first, strict=True))


def _train(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate({"steps": 100, "lr": 1.0, **changes})


def test_the_learning_rate_rises_in_the_warmup_and_falls_to_its_minimum() -> None:
    for schedule in ("cosine", "linear"):
        train = _train(schedule=schedule, lr_warmup_steps=10, min_lr_ratio=0.1)
        rates = [lr_at(index, 100, train) for index in range(101)]
        assert rates[0] == pytest.approx(0.1)
        assert rates[9] == rates[10] == 1.0
        assert rates[10:] == sorted(rates[10:], reverse=True)
        assert rates[55] == pytest.approx(0.55)
        assert rates[100] == pytest.approx(0.1)


def test_a_constant_rate_stays() -> None:
    train = _train(schedule="constant", warmup_ratio=0.05)
    assert {lr_at(index, 100, train) for index in range(4, 100)} == {1.0}
    assert lr_at(0, 100, train) == pytest.approx(0.2)


def test_a_global_batch_that_cannot_be_split_names_the_world_sizes_that_work() -> None:
    train = _train(global_batch=12, micro_batch=2)
    assert [train.accumulation(n) for n in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(ConfigError, match=r"global_batch=12.*5 workers.*\[1, 2, 3, 6\]") as caught:
        train.accumulation(5)
    assert caught.value.facts["works"] == [1, 2, 3, 6]


def test_epochs_become_whole_steps() -> None:
    train = TrainConfig.model_validate({"epochs": 1.5, "global_batch": 10})
    assert train.total_steps(num_sequences=105) == 15
