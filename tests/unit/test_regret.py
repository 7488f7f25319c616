"""Adam's regret under composite recoveries."""

import json

import numpy as np
import pytest

from layercheck.errors import ConfigError
from simulations import regret as command
from simulations.online_adam import Problem, run

PROBLEM = Problem(steps=3000, s_max=20, num_failures=5)


@pytest.fixture(scope="module")
def curves():
    return run(PROBLEM)


def test_a_layer_is_never_farther_from_its_version_than_its_drift(curves):
    """|W(tau) - W(t_l)| <= D_l, the measurable part of the analysis."""
    distance = np.array([jump.distance for jump in curves.jumps])
    path = np.array([jump.path for jump in curves.jumps])
    assert np.all(distance <= path + 1e-12)
    assert (distance > 0).mean() > 0.8
    assert (distance < 0.99 * path).any()


def test_the_added_term_stays_within_its_bound(curves):
    added = curves.regret - curves.regret[0]
    assert np.all(added[1:] <= curves.bound[1:] + 1e-9)
    assert np.all(curves.bound[0] == 0)
    assert added[2].max() > 0


def test_the_average_regret_falls_with_and_without_recoveries(curves):
    average = curves.regret / curves.at
    assert np.all(average[:, -1] < average[:, 0] / 5)


def test_a_growing_number_of_failures_is_the_square_root_of_time(curves):
    assert curves.num_failures == {"none": 0, "fixed": 5, "sqrt": len(range(7, 55))}


def test_the_command_writes_curves_and_refuses_ages_that_do_not_fit(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path), "--steps", "400", "--s-max", "10", "--failures", "2"]) == 0
    content = json.loads((tmp_path / "regret.json").read_text())
    assert content["failures"]["fixed"] == 2
    assert (tmp_path / "regret.svg").stat().st_size > 1000
    assert command.main(["--out", str(tmp_path), "--steps", "20", "--s-max", "10"]) == 2
    assert "steps=20" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        Problem(steps=10, s_max=10)
