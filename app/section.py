"""The base of all sections of a configuration, and its paths.

Workers run in other folders than the one that a configuration was given in: paths are made whole where they
are read, and a configuration that is passed on means the same places.
"""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


def _whole(value: str) -> str:
    value = value.removeprefix("file://")
    return value if "://" in value else str(Path(value).expanduser().absolute())


def _whole_if_there(value: str) -> str:
    return _whole(value) if value != "bundled" and Path(value).expanduser().exists() else value


Place = Annotated[str, AfterValidator(_whole)]
"""A local path, or a URI."""
PlaceOrName = Annotated[str, AfterValidator(_whole_if_there)]
"""A local path that exists here; whatever does not is a name, such as that of a hub."""
