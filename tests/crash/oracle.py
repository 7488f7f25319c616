"""What a recovery must give, known without asking the code under test.

The oracle is told what the ranks saved and sees when the write of a commit began and when it returned. A
commit whose write returned is a promise; one whose write was cut off may exist or not, but only as a whole.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from layercheck.layers import LayerMap, ParamSpec
from layercheck.manifest import RecoveryPlan
from tests.runs import LAYERS, WARMUP, layer_map

FROZEN = ("frozen",)
MAP: LayerMap = layer_map(FROZEN)
Saved = tuple[int, int]
"""(step, attempt) of an event."""
Composite = dict[str, Saved]
"""Layer -> the event that its version comes from."""
_COMMIT = re.compile(r"events/step-(\d+)\.a(\d+)/commit\.parquet")
_PROGRESS = re.compile(r"attempts/a\d+\.progress\.json")


def true_values(param: ParamSpec, key: str, step: int, attempt: int) -> npt.NDArray[np.float32]:
    """What a parameter's weights (`fp32`) or moments (`exp_avg`) are after a step of an attempt."""
    start = crc32(f"{param.name}/{key}".encode()) % 1000 + 10_000 * step + 1_000_000 * attempt
    return np.arange(start, start + param.numel, dtype=np.float32)


@dataclass
class Oracle:
    """The promises of one run.

    Attributes:
        layers_of: event -> its layers, as the ranks were told to save them.
        sure: events whose commit is durable and counts, oldest first.
        maybe: events whose commit was being written when somebody died.
        rotten: (layer, event) of versions of which a byte has rotted.
        told: newest step that was reported complete; `journaled` the newest that is durable.
        acknowledged: newest step that the session was told is committed.
    """

    layers_of: dict[Saved, tuple[str, ...]] = field(default_factory=dict)
    sure: list[Saved] = field(default_factory=list)
    maybe: list[Saved] = field(default_factory=list)
    rotten: set[tuple[str, Saved]] = field(default_factory=set)
    told: int = 0
    journaled: int = 0

    def copy(self) -> "Oracle":
        return Oracle(
            dict(self.layers_of),
            list(self.sure),
            list(self.maybe),
            set(self.rotten),
            self.told,
            self.journaled,
        )

    # ------------------------------------------------------------------ what happens

    @contextmanager
    def writing(self, path: str) -> Iterator[None]:
        """Around each write of the coordinator's storage."""
        commit = _COMMIT.search(path)
        event = (int(commit[1]), int(commit[2])) if commit else None
        if event is not None and event not in self.maybe:
            self.maybe.append(event)
        beating = self.told
        yield
        if event is not None:
            self.maybe.remove(event)
            self.sure.append(event)
        elif _PROGRESS.search(path):
            self.journaled = max(self.journaled, beating)

    def acknowledge(self, attempt: int, committed_step: int, lost_steps: Iterable[int]) -> None:
        """The session was told: from now on it counts these events as safe."""
        lost = set(lost_steps)
        for event in list(self.layers_of):
            if event[1] != attempt or event[0] > committed_step or event[0] in lost:
                continue
            assert event in self.sure or event in self.maybe, f"{event} was called committed and is not"
            if event in self.maybe:
                self.maybe.remove(event)
                self.sure.append(event)

    def rot(self, layer: str) -> Saved:
        """The newest version of this layer rots."""
        event = [e for e in self.sure if layer in self.layers_of[e]][-1]
        self.rotten.add((layer, event))
        return event

    # ------------------------------------------------------------------ what must come back

    def check(self, plan: RecoveryPlan | None) -> None:
        """The plan that a recovery carried out is right, and from now on is a promise itself."""
        if plan is None:
            assert not self.sure, f"from zero although {self.sure[-1]} is committed"
            self.layers_of, self.maybe, self.told, self.journaled = {}, [], 0, 0
            return
        got = {layer.layer: (layer.step, layer.attempt) for layer in plan.layers}
        right = [(present, *self._expected(present)) for present in self._possible()]
        matching = [(present, full) for present, composite, full in right if composite == got]
        assert matching, f"got {got}, right would be {[composite for _, composite, _ in right]}"
        present, full = matching[0]
        self.sure += present
        self.maybe = []
        newest = max((step for step, _ in self.sure), default=0)
        if full is not None:
            assert plan.resume_step == full[0] + 1, (
                f"resume step {plan.resume_step} after a roll-back to {full}"
            )
            self.sure = [event for event in self.sure if event[0] <= full[0]]
        else:
            assert plan.resume_step == plan.t_fail + 1
            lowest, highest = max(self.journaled, newest), max(self.told, newest)
            assert lowest <= plan.t_fail <= highest, f"t_fail {plan.t_fail} not in {lowest}..{highest}"
        done = plan.resume_step - 1
        assert plan.trainer_state.get("consumed", 0) == 10 * done, "trainer state of another step"
        self.told = self.journaled = done

    def _possible(self) -> list[list[Saved]]:
        """Each unfinished commit is there or not; in step order, so a later one is not without an earlier."""
        return [list(some) for n in range(len(self.maybe) + 1) for some in combinations(self.maybe, n)]

    def _expected(self, present: list[Saved]) -> tuple[Composite | None, Saved | None]:
        """The right composite with these unfinished commits, and the full event if it is a roll-back."""
        events = sorted([*self.sure, *present])
        newest = {name: self._newest(name, events, lambda _: True) for name in LAYERS}
        frozen = {
            name: self._newest(name, events, lambda e, n=name: (n, e) not in self.rotten) for name in FROZEN
        }
        full = None
        if all(event is not None and event[0] >= WARMUP for event in newest.values()):
            chosen = {
                name: self._newest(name, events, lambda e, n=name: (n, e) not in self.rotten)
                for name in LAYERS
            }
        else:
            fulls = [e for e in events if set(LAYERS) <= set(self.layers_of[e])]
            full = max((e for e in fulls if not any((n, e) in self.rotten for n in LAYERS)), default=None)
            chosen = dict.fromkeys(LAYERS, full)
        whole = {name: event for name, event in (chosen | frozen).items() if event is not None}
        return (whole if len(whole) == len(MAP.layers) else None), full

    def _newest(self, layer: str, events: list[Saved], usable: Callable[[Saved], bool]) -> Saved | None:
        return max((e for e in events if layer in self.layers_of[e] and usable(e)), default=None)

    def key(self) -> Any:
        """Equal for oracles that expect the same."""
        return repr(
            (
                sorted(self.layers_of.items()),
                self.sure,
                self.maybe,
                sorted(self.rotten),
                self.told,
                self.journaled,
            )
        )
