"""Patterns: how modules, ops and values are named several at a time."""

from __future__ import annotations

from fnmatch import fnmatchcase


def fits(text: str, pattern: str) -> bool:
    """Return whether a name fits a pattern: ``*``, ``?`` and ``[...]`` stand for text, and brackets for themselves too.

    >>> fits("softmax_7", "soft*_[0-9]"), fits("heads[0]", "heads[0]"), fits("heads[0]", "*[0]"), fits("heads1", "heads[0]")
    (True, True, True, False)
    """
    return fnmatchcase(text, pattern) or (
        "[" in pattern and fnmatchcase(text, pattern.replace("[", "[[]"))
    )


def is_inside(module: str, pattern: str) -> bool:
    """Return whether a module fits a pattern, or is inside one that does."""
    return fits(module, pattern) or fits(module, f"{pattern}.*")
