"""The layers of a plan, one after the other, each whole and checked."""

from collections.abc import Iterator
from dataclasses import dataclass

from layercheck.errors import DamagedShardError
from layercheck.layers import LayerSpec, ParamSpec
from layercheck.manifest import BadShard, LayerPlan, RecoveryPlan, RunRecord
from layercheck.persistence.storage import Storage
from layercheck.recovery.fetch import FetchedLayer, Fetcher


class BadShardError(DamagedShardError):
    """A shard of the plan is bad: the plan has to be made again without it."""

    def __init__(self, shard: BadShard) -> None:
        super().__init__(f"{shard.file}: layer {shard.layer}: {shard.error}", file=shard.file)
        self.shard = shard


@dataclass(frozen=True, slots=True)
class _Whole:
    """A parameter, wanted from its first element to its last."""

    spec: ParamSpec
    offset: int = 0

    @property
    def numel(self) -> int:
        return self.spec.numel


@dataclass(frozen=True, slots=True)
class Composite:
    """What is exported: a run and the plan of its state."""

    storage: Storage
    run: RunRecord
    plan: RecoveryPlan

    @property
    def step(self) -> int:
        """The step that this state counts as done."""
        return self.plan.resume_step - 1

    def layers(self, keys: frozenset[str] | None = None) -> Iterator[FetchedLayer]:
        """Every layer in model order. One is held at a time if the caller pops its slices.

        Args:
            keys: which tensors (`fp32`, `exp_avg`, ...); None means all.

        Raises:
            BadShardError: a shard failed its check twice.
        """
        fetcher = Fetcher(self.storage, keys)
        planned = {layer.layer: layer for layer in self.plan.layers}
        for layer in self.run.layer_map.layers:
            yield _fetched(fetcher, planned[layer.name], layer)


def _fetched(fetcher: Fetcher, plan: LayerPlan, layer: LayerSpec) -> FetchedLayer:
    fetched = fetcher.fetch(plan, [_Whole(spec) for spec in layer.params])
    if isinstance(fetched, BadShard):
        raise BadShardError(fetched)
    return fetched
