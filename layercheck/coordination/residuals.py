"""Which residual belongs to a version. Pure.

A residual adds to one version and never to another residual, so of each version the newest one counts and all
others are garbage; one whose version is gone, dead or damaged is of no use to anybody.
"""

from collections.abc import Iterable, Mapping

from layercheck.coordination.facts import SaveKey, Version, saves_of
from layercheck.coordination.lineage import ENDLESS
from layercheck.manifest import Commit, PlannedSave

BaseKey = tuple[str, int, int]
"""(layer, step, attempt) of a version; of two in one state either will do."""


def by_base(commits: Iterable[Commit], until: int = ENDLESS) -> dict[BaseKey, list[Version]]:
    """The complete residuals of steps up to `until` by the version that they add to, newest first."""
    found: dict[BaseKey, list[Version]] = {}
    for commit in commits:
        for save in saves_of(commit):
            if save.base is not None and save.event.step <= until:
                found.setdefault((save.layer, *save.base), []).append(save)
    for residuals in found.values():
        residuals.sort(key=lambda residual: residual.order, reverse=True)
    return found


def newest(
    version: Version, residuals: Mapping[BaseKey, list[Version]], bad: frozenset[SaveKey]
) -> Version | None:
    """The newest undamaged residual of a version."""
    return next((one for one in residuals.get(_base_key(version), ()) if one.key not in bad), None)


def has_newer_bad(
    version: Version, residuals: Mapping[BaseKey, list[Version]], bad: frozenset[SaveKey]
) -> bool:
    """True if a damaged residual of it is newer than all good ones."""
    of_version = next(iter(residuals.get(_base_key(version), ())), None)
    return of_version is not None and of_version.key in bad


def _base_key(version: Version) -> BaseKey:
    return version.layer, *version.state


def planned(residual: Version | None) -> PlannedSave | None:
    """As a plan names it."""
    if residual is None:
        return None
    return PlannedSave(
        step=residual.event.step, attempt=residual.event.attempt, shards=tuple(residual.shards)
    )
