"""Interrupts: on the command line Ctrl-C is quiet from the first moment, also while torch is imported, which takes seconds.

Nothing here imports anything large: the package calls it before all else.
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
"""The exit code that shells know of processes that Ctrl-C ended."""


def is_command_line() -> bool:
    """Return whether this process was started as ``fxckpt`` or ``python -m fxckpt``."""
    started = sys.argv[0] if getattr(sys, "argv", None) else ""
    if started == "-m":  # what Python calls itself until it has found the module
        return ("-m", "fxckpt") in pairwise(sys.orig_argv)
    return Path(started).stem == "fxckpt"


def leave_quietly() -> None:
    """Let Ctrl-C end the process of the command line without a traceback. Leaves all other processes, and handlers that others set, alone."""
    is_main = threading.current_thread() is threading.main_thread()
    if (
        is_command_line()
        and is_main
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def raised() -> Iterator[None]:
    """Let Ctrl-C raise ``KeyboardInterrupt`` for a while, where it would end the process."""
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
    # An exception could be caught, or turned into another one, by whatever is being imported.
    os._exit(INTERRUPTED)
