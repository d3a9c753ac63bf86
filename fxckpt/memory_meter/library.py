"""The counting allocator as a shared library, compiled once and cached on disk."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from fxckpt.torch_private import cpp_command
from fxckpt.utils.cache_folder import cache_dir

log = logging.getLogger("fxckpt")

SOURCE = Path(__file__).with_name("counting_allocator.cpp")
COMPILE_SECONDS = 120.0
"""Timeout of the compiler, which takes a second or two."""


@cache
def load_library() -> ctypes.PyDLL | None:
    """Return the library, compiled if this machine has none yet, or None where that fails.

    The reason of a failure is logged.
    """
    try:
        library = _kept_or_temporary()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None)
        log.warning(
            "memory in use on the CPU is not counted to the byte: the allocator that counts it "
            "could not be compiled (%s). Install a C++ compiler, or name it in CXX.",
            f"{error}: {output.strip()}" if output else error,
        )
        return None
    counts = ("allocated", "peak", "take_peak", "peak_of_threads", "refused", "set_limit", "adopt")
    for name in counts:
        getattr(library, f"fxckpt_{name}").restype = ctypes.c_int64
    library.fxckpt_watch_threads.restype = None
    library.fxckpt_set_limit.argtypes = [ctypes.c_int64]
    library.fxckpt_adopt.argtypes = [ctypes.c_void_p]
    return library


def _kept_or_temporary() -> ctypes.PyDLL:
    try:
        return _open(cache_dir() / "native")
    except OSError as error:
        log.info("the memory meter is compiled in a temporary folder (%s)", error)
    with tempfile.TemporaryDirectory() as folder:
        return _open(Path(folder))


def _open(folder: Path) -> ctypes.PyDLL:
    """Load the library of ``folder``, and compile it first if it is missing or damaged."""
    path = folder / f"counting_allocator-{_key()}.so"
    # Such calls keep Python's lock: giving it back would take longer than they do.
    if path.exists():
        try:
            return ctypes.PyDLL(str(path))
        except OSError as error:
            log.info("the memory meter is compiled again (%s)", error)
    _compile(path)
    return ctypes.PyDLL(str(path))


def _key() -> str:
    """Return a hash of what the compiled library depends on."""
    parts = (
        SOURCE.read_text(encoding="utf-8"),
        torch.__version__,
        str(torch.version.git_version),
        platform.platform(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(path: Path) -> None:
    """Compile the source to ``path``, in one step as other processes see it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="compiling-") as folder:
        made = Path(folder) / path.name
        subprocess.run(
            cpp_command(SOURCE, made),
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMPILE_SECONDS,
        )
        os.replace(made, path)
