"""Progress of work that takes long, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

SHOWN_AFTER = 3.0
"""Seconds from which on work is shown."""


@dataclass(frozen=True)
class Progress:
    """Progress of one piece of work."""

    bar: tqdm[Any] | None = None

    def tick(self, stage: str = "") -> None:
        """Count one more part of the work, and name what comes."""
        if self.bar is not None:
            if stage:
                self.bar.set_postfix_str(stage, refresh=False)
            self.bar.update()


_counted: ContextVar[Progress | None] = ContextVar("counted", default=None)
"""Where schedules are counted; None outside of all work."""


@contextmanager
def progress(description: str, unit: str, total: int | None = None) -> Iterator[Progress]:
    """Show work on a terminal once it has taken three seconds, without the work inside it."""
    with _bar(description, unit, total) as bar:
        token = _counted.set(Progress())
        try:
            yield Progress(bar)
        finally:
            _counted.reset(token)


@contextmanager
def searching(description: str) -> Iterator[None]:
    """Show how many schedules were tried, if this is no part of other work."""
    if _counted.get() is not None:
        yield
        return
    with _bar(description, "schedules") as bar:
        token = _counted.set(Progress(bar))
        try:
            yield
        finally:
            _counted.reset(token)


def tick(stage: str = "") -> None:
    """Count one more schedule, and name what comes."""
    if (counted := _counted.get()) is not None:
        counted.tick(stage)


def _bar(description: str, unit: str, total: int | None = None) -> tqdm[Any]:
    return tqdm(
        total=total, desc=description, unit=f" {unit}", delay=SHOWN_AFTER, disable=None, leave=False
    )
