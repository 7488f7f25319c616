"""The last save: its order and parts, and the signals that announce it."""

import os
import signal
import threading
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercheck.config import LayerCheckConfig
from layercheck.end_signals import EndSignals, listen
from layercheck.errors import ConfigError
from layercheck.tracking.policy import LayerFacts, PolicyFacts
from layercheck.tracking.preemption import last_parts

STEP = 50


@st.composite
def policy_facts(draw: st.DrawFn) -> PolicyFacts:
    layers = draw(
        st.lists(
            st.builds(
                LayerFacts,
                name=st.just(""),
                kind=st.sampled_from(["block", "embedding", "other"]),
                numel=st.integers(1, 1000),
                drift=st.floats(0, 10),
                selected=st.integers(-1, STEP),
                committed=st.integers(-1, STEP),
                overdue=st.booleans(),
            ),
            min_size=1,
            max_size=30,
        )
    )
    named = tuple(
        LayerFacts(f"l{i}", x.kind, x.numel, x.drift, x.selected, x.committed, overdue=x.overdue)
        for i, x in enumerate(layers)
    )
    return PolicyFacts(
        1e-4, 1.0, 1e-4, 1.0, step=STEP, margin=5, newest_full=0, event_taken=False, layers=named
    )


@given(policy_facts(), st.floats(0.01, 1))
def test_every_layer_without_a_version_of_this_step_goes_exactly_once(known: PolicyFacts, share: float):
    parts = last_parts(known, LayerCheckConfig(max_event_share=share))
    saved = [write.layer for part in parts for write in part.writes]
    assert sorted(saved) == sorted(layer.name for layer in known.layers if layer.selected < STEP)
    assert {write.reason for part in parts for write in part.writes} <= {"preemption"}
    assert all(part.writes and part.step == STEP for part in parts)


@given(policy_facts(), st.floats(0.01, 1))
def test_no_part_is_larger_than_its_share_but_for_one_layer_and_none_is_split_needlessly(
    known: PolicyFacts, share: float
):
    numel = {layer.name: layer.numel for layer in known.layers}
    room = share * sum(numel.values())
    parts = [
        [numel[write.layer] for write in part.writes]
        for part in last_parts(known, LayerCheckConfig(max_event_share=share))
    ]
    assert all(len(part) == 1 or sum(part) <= room for part in parts)
    assert all(sum(part) + after[0] > room for part, after in pairwise(parts))


@given(policy_facts())
def test_the_most_drifted_per_byte_goes_first_and_what_a_recovery_left_due_before_all(known: PolicyFacts):
    by_name = {layer.name: layer for layer in known.layers}
    parts = last_parts(known, LayerCheckConfig(max_event_share=0.1))
    order = [by_name[write.layer] for part in parts for write in part.writes]
    worth = [inf if layer.overdue else layer.drift / layer.numel for layer in order]
    assert worth == sorted(worth, reverse=True)


def test_a_signal_is_noted_once_and_the_handler_before_is_called_too_and_put_back():
    heard: list[int] = []

    def before(signum: int, frame: object) -> None:
        heard.append(signum)

    original = signal.signal(signal.SIGUSR1, before)
    try:
        signals = listen(["SIGUSR1"])
        assert signals.came is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (signals.came, heard) == ("SIGUSR1", [signal.SIGUSR1])
        first = signals.came_at
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.came_at == first > 0
        signals.restore()
        assert signal.getsignal(signal.SIGUSR1) is before
    finally:
        signal.signal(signal.SIGUSR1, original)


def test_without_chaining_nothing_of_the_handler_before_happens():
    def before(signum: int, frame: object) -> None:
        raise SystemExit(1)

    original = signal.signal(signal.SIGUSR1, before)
    try:
        signals = listen(["SIGUSR1"], chain=False)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.came == "SIGUSR1"
        signals.restore()
    finally:
        signal.signal(signal.SIGUSR1, original)


def test_a_handler_that_somebody_set_since_is_left_alone():
    original = signal.getsignal(signal.SIGUSR1)
    try:
        signals = listen(["SIGUSR1"])
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signals.restore()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, original)


def test_another_thread_finds_what_the_main_thread_watches_and_never_restores_it():
    found: list[EndSignals] = []

    def in_thread() -> None:
        found.append(listen(["SIGUSR1"]))
        found[0].restore()

    original = signal.getsignal(signal.SIGUSR1)
    try:
        watched = listen(["SIGUSR1"])
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert found == [watched]
        assert found[0].came == "SIGUSR1"
        watched.restore()
    finally:
        signal.signal(signal.SIGUSR1, original)


def test_a_thread_that_cannot_watch_says_how_to(caplog: pytest.LogCaptureFixture):
    found: list[EndSignals] = []
    thread = threading.Thread(target=lambda: found.append(listen(["SIGUSR2"])))
    thread.start()
    thread.join()
    assert found[0].came is None
    assert "SIGUSR2 cannot be watched from this thread" in caplog.text


@pytest.mark.parametrize("name", ["SIGKILL", "USR1", "SIGNONE"])
def test_a_signal_that_cannot_be_watched_is_refused_with_its_name(name: str):
    with pytest.raises(ConfigError, match=f"preemption_signals: '{name}'"):
        listen([name])
    with pytest.raises(ValueError, match=name):
        LayerCheckConfig(preemption_signals=(name,))
