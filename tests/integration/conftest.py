"""A run that several tests recover, each from its own copy."""

from functools import partial
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.integration.ranks import KILL_AT, STEPS, train


@pytest.fixture(scope="session")
def killed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage whose run `run` had its two ranks killed after step 27."""
    tmp = tmp_path_factory.mktemp("killed")
    assert run_ranks(2, tmp, partial(train, kill_at=KILL_AT), str(tmp / "store"), STEPS) == [None, None]
    return tmp / "store"
