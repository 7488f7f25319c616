"""Settings: unknown keys and contradictions end before training, in words that name key and value."""

import pytest
from pydantic import ValidationError

from layercheck.config import LayerCheckConfig, parse_config
from layercheck.errors import ConfigError


def test_the_defaults_are_valid_and_those_of_the_design():
    config = parse_config(None)
    assert (config.target_interval, config.s_max, config.max_event_share) == (100, 400, 0.15)
    assert (config.warmup_steps, config.warmup_full_every, config.full_every) == (200, 100, 2000)
    assert (config.keep_versions, config.keep_full, config.probation_steps) == (2, 1, 20)


def test_a_configuration_is_taken_as_it_is():
    config = LayerCheckConfig(s_max=500)
    assert parse_config(config) is config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"s_mx": 400}, "unknown key 's_mx' (value 400)"),
        ({"drift": {"nrom": "rms"}}, "unknown key 'drift.nrom'"),
        ({"drift": {"norm": "max"}}, "drift.norm='max'"),
        ({"s_max": 3}, "s_max=3"),
        ({"max_event_share": 0}, "max_event_share=0"),
        ({"s_max": 100, "target_interval": 50}, "warmup_full_every=100 must be at most 3/4 of s_max=100"),
        ({"k0": 1e-3, "k0_per_lr": 5.0}, "give k0=0.001 or k0_per_lr=5.0, not both"),
        ({"target_interval": 500}, "target_interval=500 is above s_max=400"),
        ({"recovery": "strict"}, "needs strict_max_age"),
        ({"drift": {"kind": "distance"}}, "drift.kind='distance'"),
        ({"k0_factors": {"norm": 0}}, "k0_factors.norm=0"),
        ({"overhead_budget": 1.5}, "overhead_budget=1.5"),
        ({"overhead_budget": 0.02, "k0": 1e-3}, "overhead_budget=0.02 moves K"),
    ],
)
def test_a_wrong_setting_is_named_with_the_value_received(settings: dict, words: str):
    with pytest.raises(ConfigError) as caught:
        parse_config(settings)
    assert words in str(caught.value)
    assert "checkpoint settings" in str(caught.value)


def test_all_wrong_keys_are_named_at_once():
    with pytest.raises(ConfigError, match=r"unknown key 'a'.*unknown key 'b'"):
        parse_config({"a": 1, "b": 2})


def test_the_target_interval_does_not_bind_where_k0_is_given():
    assert parse_config({"target_interval": 500, "k0": 1e-3}).k0 == 1e-3


def test_settings_cannot_change_after_construction():
    with pytest.raises(ValidationError):
        parse_config(None).s_max = 5


def test_a_configuration_survives_its_json():
    config = parse_config(
        {"s_max": 600, "drift": {"norm": "rms"}, "k0_factors": {"a*": 2}, "overhead_budget": 0.02}
    )
    assert parse_config(config.model_dump(mode="json")) == config
