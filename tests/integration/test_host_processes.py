"""Hosts of GEMINI as processes without Ray: memory of their own each, all of it gone at the end."""

import os

import pytest

from app.baselines.gemini.memory import HostMemoryError, attach, is_held
from app.baselines.gemini.records import BoxShape
from app.measure.hosts import ProcessHosts, host_processes

SHAPE = BoxShape(100, 10_000)


def test_each_rank_has_a_host_whose_memory_ends_with_it() -> None:
    with host_processes(["a", "b"]) as stores:
        ranks = [ProcessHosts(stores, rank) for rank in (0, 1)]
        assert [hosts.here for hosts in ranks] == ["a", "b"]
        opened = [
            hosts.own().open({(rank, rank): SHAPE}, 0)[rank, rank][1] for rank, hosts in enumerate(ranks)
        ]
        assert len({region.pid for region in opened} | {os.getpid()}) == 3
        for region in opened:
            attach(region)[:3] = b"abc"
        assert ranks[0].own().read((0, 0), 0, 4) == b"abc\0"
        assert ranks[1].living().keys() == {"a", "b"}
    assert not any(is_held(region) for region in opened)
    for region in opened:
        with pytest.raises(HostMemoryError, match="does not give its memory away"):
            attach(region)


def test_a_complete_run_gives_the_memory_of_all_hosts_back() -> None:
    with host_processes(["a", "b"]) as stores:
        opened = [store.open({(0, 0): SHAPE}, 0)[0, 0][1] for store in stores.values()]
        assert all(is_held(region) for region in opened)
        ProcessHosts(stores, 1).end_all()
        assert not any(is_held(region) for region in opened)
