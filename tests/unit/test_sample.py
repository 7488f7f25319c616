"""What a sample looks at: every element once a rotation, nothing of the padding, close to the whole."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layercheck.tracking.sample import (
    EXACT,
    SAMPLED,
    SAMPLED_EMBEDDING,
    SMALL_NUMEL,
    Density,
    Rule,
    SubGroupSample,
    norms,
    phase_of,
)

NUMEL = 50_003


EVERY_RULE = sorted({*SAMPLED.rules, *SAMPLED_EMBEDDING.rules}, key=lambda rule: rule.every)


def sample_of(flat: torch.Tensor, density: Density, *segments: tuple[int, int]) -> SubGroupSample:
    group: Any = SimpleNamespace(layer="a", flat=flat, segments=segments or ((0, flat.numel()),))
    return SubGroupSample(group, density)


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_a_rotation_looks_at_every_whole_block_once_and_never_at_the_padding(rule: Rule) -> None:
    seen = torch.zeros(NUMEL + 100, dtype=torch.int64)
    sample = sample_of(seen, Density((rule,)), (7, NUMEL))
    for step in range(rule.every):
        for view in sample.views(phase_of(step)):
            view.add_(1)
    whole = NUMEL // rule.block * rule.block
    assert set(seen[7 : 7 + whole].tolist()) == {1}
    assert seen[:7].sum() == seen[7 + whole :].sum() == 0


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_slots_have_the_shapes_of_the_views_and_lie_apart_in_every_phase(rule: Rule) -> None:
    flat = torch.arange(3.0 * NUMEL)
    sample = sample_of(flat, Density((rule,)), (0, NUMEL), (NUMEL + 5, 100), (NUMEL + 200, NUMEL))
    scratch = torch.empty(sample.numel)
    for phase in range(rule.every):
        views, slots = sample.views(phase), sample.slots(scratch, phase)
        torch._foreach_copy_(slots, views)
        assert len(views) == len(slots) == len(sample) == 3
        assert all(torch.equal(slot, view) for slot, view in zip(slots, views, strict=True))
        looked = [weight * view.numel() for weight, view in zip(sample.weights(phase), views, strict=True)]
        assert looked == pytest.approx([NUMEL, 100, NUMEL])


def test_small_runs_and_exact_rules_are_looked_at_whole() -> None:
    for sample in (sample_of(torch.ones(SMALL_NUMEL), SAMPLED), sample_of(torch.ones(NUMEL), EXACT)):
        assert sample.weights(3) == [1.0]
        assert sample.views(3)[0].numel() == sample.numel


def test_a_long_run_is_looked_at_as_thinly_as_leaves_enough_blocks() -> None:
    for density in (SAMPLED, SAMPLED_EMBEDDING):
        thinnest, densest = density.rules[0], density.rules[-1]
        enough = density.enough * thinnest.block * thinnest.every
        assert density.rule(enough) == thinnest
        assert density.rule(enough - 1) == density.rules[1]
        assert density.rule(SMALL_NUMEL) == density.densest.rule(enough) == densest
        assert [rule.every for rule in density.rules] == sorted(
            {r.every for r in density.rules}, reverse=True
        )
    assert EXACT.rule(10**9).every == 1


@pytest.mark.parametrize("shares", ["rows of the tokens seen", "all rows"])
def test_the_accumulated_estimate_of_an_embedding_stays_within_five_percent(shares: str) -> None:
    """Rows drawn by Zipf's law; in the sparse case all other rows stand still."""
    generator = torch.Generator().manual_seed(3)
    rows, width = 8192, 128
    prior = 1 / torch.arange(1, rows + 1, dtype=torch.float32)
    place = torch.randperm(rows, generator=generator)
    estimate = exact = 0.0
    for step in range(60):
        update = torch.zeros(rows, width)
        if shares == "all rows":
            update += 0.05
        seen = place[torch.multinomial(prior, 2048, replacement=True, generator=generator)]
        update.index_put_((seen,), torch.randn(2048, width, generator=generator), accumulate=True)
        sample = sample_of(update.flatten(), SAMPLED_EMBEDDING)
        phase = phase_of(step)
        (norm,), (weight,) = norms(sample.views(phase), 1), sample.weights(phase)
        estimate, exact = estimate + float(norm) * weight, exact + float(update.abs().sum())
        if step + 1 >= 20 and (step + 1) % 10 == 0:
            assert estimate == pytest.approx(exact, rel=0.05), f"step {step + 1}"


def test_the_rotation_is_that_of_the_thinnest_run() -> None:
    flat = torch.ones(3_000_000)
    long, short, small = (0, 2_500_000), (2_500_000, 100_000), (2_700_000, 100)
    assert sample_of(flat, SAMPLED, long, short, small).rotation == 509
    assert sample_of(flat, SAMPLED, short, small).rotation == 61
    assert sample_of(flat, SAMPLED, small).rotation == sample_of(flat, EXACT, long).rotation == 1
