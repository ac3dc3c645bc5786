"""Files of the user's cache: in folders that only the user writes to, whole or not there.

Code is kept in them, and it runs when it is found again.

This module must stay light to import (no torch): compile workers import it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

_SEAL = b"gtco-sha256:"


def private_folder(folder: Path) -> str | None:
    """Make `folder` and the folders above it that are missing, with mode 0700.

    Returns:
        Why it must not hold code, or None.

    Raises:
        OSError: it cannot be made.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is no folder"
    if status.st_uid != os.getuid():
        return f"{folder} belongs to another user"
    if _others_write(status.st_mode):
        return f"{folder} can be written by other users (chmod 700 makes it usable)"
    above = folder.resolve().parent
    mode = above.stat().st_mode
    if _others_write(mode) and not mode & stat.S_ISVTX:  # they could put another in its place
        return f"{above} can be written by other users (chmod 700 makes it usable)"
    return None


def _others_write(mode: int) -> bool:
    return bool(mode & (stat.S_IWGRP | stat.S_IWOTH))


def publish(path: Path, data: bytes) -> None:
    """Write a file that other processes see whole or not at all, whatever happens meanwhile.

    Raises:
        OSError: it cannot be written; nothing stays behind.
    """
    handle, temporary = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sealed(name: str, data: bytes) -> bytes:
    """`data` with a checksum of it and of its file's name at the end, where loaders do not look."""
    return data + _SEAL + hashlib.sha256(name.encode() + data).hexdigest().encode()


def seal_fault(path: Path) -> str | None:
    """Why the sealed file at `path` must not be used, or None.

    Raises:
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    data, seal, _ = content.rpartition(_SEAL)
    if not seal:
        return "it has no checksum, or is cut short"
    if sealed(path.name, data) != content:
        return "its checksum differs, or it is another's"
    return None
