"""A storage that not everybody sees: one error on every rank, before training, and nothing is lost."""

from functools import partial
from pathlib import Path

import pytest

from layercheck.errors import StorageError
from tests import micro
from tests.harness import RankFailedError, run_ranks
from tests.integration.ranks import open_session, train


def _rank_one_elsewhere(folder: str) -> None:
    import torch.distributed as dist

    from layercheck.persistence.storage import LocalStorage

    store = LocalStorage(f"{folder}/{dist.get_rank()}/run/layercheck")
    open_session(micro.build(), folder, store=store).resume()


def _coordinator_elsewhere(folder: str) -> None:
    import torch.distributed as dist

    import layercheck
    from layercheck.config import LayerCheckConfig
    from layercheck.coordination.in_process import in_process_client
    from layercheck.persistence.storage import LocalStorage

    rank, world = dist.get_rank(), dist.get_world_size()
    coordinator = in_process_client(LocalStorage(f"{folder}/there"), LayerCheckConfig(), rank, world)
    layercheck.attach(micro.build(), f"{folder}/here", "run", coordinator=coordinator).resume()


def test_a_storage_that_another_rank_does_not_see_is_one_error_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_ranks(2, tmp_path, _rank_one_elsewhere, str(tmp_path / "store"))
    text = str(caught.value)
    assert text.count("StorageError: storage") == 2
    assert "rank 1 does not see what rank 0 wrote there" in text
    assert "another rank does not see what rank 0 wrote there" in text
    left = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert left == [], "the probe is taken away again, and no run was begun"


def test_a_storage_that_the_coordinator_does_not_see_is_one_error_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_ranks(2, tmp_path, _coordinator_elsewhere, str(tmp_path))
    assert str(caught.value).count("layercheck.errors.StorageError") == 2
    assert not (tmp_path / "there").exists()


def _recover_without_an_answer(storage: str) -> None:
    import errno

    import torch.distributed as dist

    from layercheck.persistence.storage import LocalStorage
    from layercheck.recovery import fetch

    class Refuses(LocalStorage):
        def read_into(self, path: str, begin: int, *into: memoryview) -> None:
            raise StorageError(f"no answer for {path}", path=path, errno=errno.ESTALE)

    fetch._TRIES = 2
    root = f"{storage}/run/layercheck"
    store = Refuses(root) if dist.get_rank() else LocalStorage(root)
    open_session(micro.build(), storage, store=store).resume()


@pytest.mark.slow
def test_i9_a_storage_that_does_not_answer_one_rank_in_a_recovery_is_one_error_on_every_rank(
    tmp_path: Path,
) -> None:
    storage = str(tmp_path / "store")
    assert run_ranks(2, tmp_path, partial(train, kill_at=6), storage, 7) == [None, None]
    with pytest.raises(RankFailedError) as caught:
        run_ranks(2, tmp_path, _recover_without_an_answer, storage)
    assert "no answer for events/" in str(caught.value)
    assert "another rank cannot read the storage" in str(caught.value)
    assert not (tmp_path / "store/run/layercheck/blacklist").exists()
    assert run_ranks(2, tmp_path, train, storage, 8)[0]["first"] > 1
