"""Fixtures that all tests share. The Ray cluster is started once and is this session's own."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A local cluster of 4 CPUs, whatever the machine has; yields its address. Joins no foreign cluster."""
    os.environ.pop("RAY_ADDRESS", None)
    import ray

    folder = tempfile.mkdtemp(prefix="lct-", dir="/tmp")  # short: sockets below it have a length limit
    context = ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield context.address_info["address"]
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
