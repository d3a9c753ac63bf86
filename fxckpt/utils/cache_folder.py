"""Folder of what is kept between processes."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Return the cache folder: ``$FXCKPT_CACHE_DIR``, else fxckpt's in the user's cache folder."""
    return Path(
        os.environ.get("FXCKPT_CACHE_DIR") or platformdirs.user_cache_dir("fxckpt", appauthor=False)
    )
