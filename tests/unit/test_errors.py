"""Errors cross process borders with their facts and their class."""

import pickle

import pytest

from layercheck import errors
from layercheck.errors import LayerCheckError

ALL = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, LayerCheckError)]


@pytest.mark.parametrize("kind", ALL)
def test_an_error_survives_pickling_with_its_facts(kind: type[LayerCheckError]):
    copy = pickle.loads(pickle.dumps(kind("layer=norm: gone", layer="norm", step=7)))
    assert type(copy) is kind
    assert str(copy) == "layer=norm: gone"
    assert copy.facts == {"layer": "norm", "step": 7}


@pytest.mark.parametrize("kind", ALL)
def test_every_error_has_one_root_and_says_in_its_docstring_what_happened(kind: type[LayerCheckError]):
    assert issubclass(kind, RuntimeError)
    assert kind.__doc__


def test_errors_of_the_user_are_value_errors_that_no_restart_mends():
    for kind in (errors.ConfigError, errors.EngineRefusedError, errors.StoreMismatchError):
        assert issubclass(kind, ValueError)
        assert not kind.retry_may_help


def test_a_fenced_group_is_not_retried():
    assert not errors.FencedError.retry_may_help


def test_a_passing_storage_error_may_be_retried():
    assert errors.StorageError.retry_may_help
    assert errors.DamagedShardError.retry_may_help
