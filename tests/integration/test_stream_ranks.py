"""Every rank reads a stream itself: what they see must be one source, or it is one error on all of them."""

from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.unit.test_stream import config, write_rows


def _opened(folder: str, cases: list[str]) -> list[str]:
    """The error of each case, "" for none; a rank finds the file of its own node under the one name."""
    import torch.distributed as dist

    from app.stream import open_stream
    from layercheck.errors import ConfigError

    place, rank, found = Path(folder), dist.get_rank(), []
    for case in cases:
        try:
            open_stream(config(place / f"node-{rank}" / f"{case}.jsonl", place / "cache", wait_s=60), rank)
            found.append("")
        except ConfigError as error:
            found.append(error.message.replace(str(place), "").replace("node-1", "node-0"))
    return found


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """Copies of the rows on two nodes; on the second some are wanting."""
    for node in ("node-0", "node-1"):
        (tmp_path / node).mkdir()
        for case in ("same", "longer", "other", "missing"):
            write_rows(tmp_path / node / f"{case}.jsonl", range(20))
    longer = tmp_path / "node-1" / "longer.jsonl"
    longer.write_text(longer.read_text() + "\n")
    other = tmp_path / "node-1" / "other.jsonl"
    other.write_text(other.read_text().replace("number 3", "number 8"))
    (tmp_path / "node-1" / "missing.jsonl").unlink()
    return tmp_path


def test_ranks_that_see_different_rows_end_with_one_error(nodes: Path) -> None:
    first, second = run_ranks(2, nodes, _opened, str(nodes), ["same", "longer", "other", "missing"])
    assert first == second
    same, longer, other, missing = first
    assert same == ""
    size = (nodes / "node-0" / "longer.jsonl").stat().st_size
    assert f"rank 1 sees a file of {size + 1} bytes, beginning " in longer
    assert f"and rank 0 a file of {size} bytes, beginning " in longer
    assert f"rank 1 sees a file of {size} bytes, beginning " in other
    assert "rank 1 sees nothing (FileNotFoundError: " in missing
