"""Is a thing damaged, or is the storage only not answering? One costs a version, the other a little time."""

import errno

from layercheck.errors import DamagedShardError, StorageError

_MEDIUM = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
"""What a read of a bad sector gives, or of bytes that a checking file system knows to be wrong."""


def is_damage(error: StorageError) -> bool:
    """True for bytes that are missing, wrong or cannot be read from the medium.

    Anything else (a mount that is stale, a server that refuses, a right that is lacking) may pass or be
    mended: nothing may be given up for it that is still there.
    """
    return isinstance(error, DamagedShardError) or error.facts.get("errno") in _MEDIUM
