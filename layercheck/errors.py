"""Every error that LayerCheck raises: one root, few leaves, each with its facts, all picklable."""

from typing import Any, ClassVar


class LayerCheckError(RuntimeError):
    """Root of all errors of this package.

    Args:
        message: one sentence that names the value received and the knob to turn.
        **facts: the same values as data (`step`, `layer`, `path`, ...), for callers that decide by them.
    """

    retry_may_help: ClassVar[bool] = True
    """False where a restart of the workers would meet the same error again."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(kind: type[LayerCheckError], message: str, facts: dict[str, Any]) -> LayerCheckError:
    return kind(message, **facts)


class ConfigError(LayerCheckError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""

    retry_may_help = False


class EngineRefusedError(LayerCheckError, ValueError):
    """The engine is of a kind whose updates the hooks would miss, or its groups mix layers."""

    retry_may_help = False


class StoreMismatchError(LayerCheckError, ValueError):
    """The store holds a run of another model, optimizer class or layout (I7)."""

    retry_may_help = False


class StorageError(LayerCheckError):
    """The storage cannot be written or read, or not every node sees it."""


class NoPlanError(LayerCheckError):
    """A store that holds a run yields no plan (I7). Never answered by starting from zero."""

    retry_may_help = False


class RunIsLiveError(LayerCheckError):
    """Another submission of this run is alive and moving."""

    retry_may_help = False


class FencedError(LayerCheckError):
    """A newer attempt has taken this run over. The caller ends without being retried (I8)."""

    retry_may_help = False


class PreemptedError(LayerCheckError):
    """The run was announced its end, has saved what it could, and was driven on all the same."""


class NonFiniteStateError(LayerCheckError):
    """The drift, loss or gradient norm is not finite after the step; nothing of it was committed (I13)."""


class RestartLoopError(LayerCheckError):
    """Several attempts in a row recovered and ended without a step of progress (I13)."""

    retry_may_help = False


class AgeBoundError(LayerCheckError):
    """A layer reached `s_max` and the storage did not commit it within `storage_wait_s` (I1)."""


class DamagedShardError(StorageError):
    """A shard file is missing, short, or does not have the checksum that its commit names (I6)."""


class VaultError(StorageError):
    """The memory tier of a node cannot take, keep or give bytes: it is full, or its vault is gone."""


class CoordinatorLostError(LayerCheckError):
    """The coordinator did not answer within the limit."""
