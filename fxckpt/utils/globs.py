"""Glob patterns over the names of modules, ops and values."""

from __future__ import annotations

from fnmatch import fnmatchcase


def fits(text: str, pattern: str) -> bool:
    """Return whether a name fits a pattern of ``*``, ``?`` and ``[...]``.

    Brackets also match themselves.

    >>> fits("softmax_7", "soft*_[0-9]"), fits("heads[0]", "heads[0]")
    (True, True)
    >>> fits("heads[0]", "*[0]"), fits("heads1", "heads[0]")
    (True, False)
    """
    return fnmatchcase(text, pattern) or (
        "[" in pattern and fnmatchcase(text, pattern.replace("[", "[[]"))
    )


def is_inside(module: str, pattern: str) -> bool:
    """Return whether a module, or a module it is inside of, fits a pattern."""
    return fits(module, pattern) or fits(module, f"{pattern}.*")
