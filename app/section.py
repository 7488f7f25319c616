"""The base of all sections of a configuration, and its paths.

Workers run in other folders than the one that a configuration was given in: paths are made whole where they
are read, and a configuration that is passed on means the same places.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


_FILE = "file://"
_NAMES = ("bundled", "chatml")
"""What the app has itself; a folder of such a name does not stand in for it."""


def _given(value: str) -> str:
    if not value.removeprefix(_FILE).strip():
        raise PydanticCustomError(
            "empty", "it is empty, which would be the working directory; use . for that"
        )
    return value


def _whole(value: str) -> str:
    value = value.removeprefix(_FILE)
    return value if "://" in value else str(Path(value).expanduser().absolute())


def _whole_if(is_there: Callable[[Path], bool], value: str) -> str:
    if value in _NAMES:
        return value
    return _whole(value) if value.startswith(_FILE) or is_there(Path(value).expanduser()) else value


Place = Annotated[str, AfterValidator(_given), AfterValidator(_whole)]
"""A local path, or a URI."""
PlaceOrName = Annotated[str, AfterValidator(_given), AfterValidator(partial(_whole_if, Path.exists))]
"""A local path that exists here, or `file://` and a path; what is neither is a name, such as one of a hub."""
FileOrName = Annotated[str, AfterValidator(_given), AfterValidator(partial(_whole_if, Path.is_file))]
"""The same where no folder can be meant: a name stays one even if a folder here is called so."""
