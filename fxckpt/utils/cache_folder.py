"""Folder of what is kept between processes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import platformdirs

log = logging.getLogger("fxckpt")

_told: set[tuple[Path, str]] = set()
"""Folders that this process has warned of, each with what could not be done there."""


def cache_dir() -> Path:
    """Return the cache folder: ``$FXCKPT_CACHE_DIR``, else fxckpt's in the user's cache folder."""
    return Path(
        os.environ.get("FXCKPT_CACHE_DIR") or platformdirs.user_cache_dir("fxckpt", appauthor=False)
    )


def warn_once(path: Path, what: str, error: Exception, effect: str) -> None:
    """Log that a file "cannot be read" or "cannot be written", once in a process for its folder."""
    if (path.parent, what) not in _told:
        _told.add((path.parent, what))
        log.warning("%s %s (%s): %s", path, what, error, effect)
