"""Quiet Ctrl-C on the command line, also during the import of torch, which takes seconds.

This module imports only the standard library: the package calls it before all other imports.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 130
"""Exit code of a process ended by Ctrl-C (128 + SIGINT)."""


def is_command_line() -> bool:
    """Return whether this process was started as ``fxckpt`` or ``python -m fxckpt``."""
    started = sys.argv[0] if getattr(sys, "argv", None) else ""
    if started == "-m":  # sys.argv[0] until Python has found the module
        return ("-m", "fxckpt") in pairwise(sys.orig_argv)
    return Path(started).stem == "fxckpt"


def leave_quietly() -> None:
    """Let Ctrl-C end the command line without a traceback.

    Does nothing in other processes, outside the main thread, or if another handler is set.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if (
        is_command_line()
        and is_main
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def raised() -> Iterator[None]:
    """Let Ctrl-C raise ``KeyboardInterrupt`` inside the context."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: object) -> NoReturn:
    os.write(2, b"fxckpt: interrupted\n")
    # A module under import could catch an exception or replace it.
    os._exit(INTERRUPTED)
