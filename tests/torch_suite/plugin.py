"""Pytest plugin that applies a way before the tests are imported, and writes their outcomes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

WAY, RESULTS = "TORCH_TESTS_WAY", "TORCH_TESTS_RESULTS"
"""Environment variables: the way, and the file of outcomes, one JSON object a line."""


def pytest_configure(config: pytest.Config) -> None:
    """Replace the parts of torch that the way names."""
    from tests.torch_suite.ways import WAYS

    config.stash[_HANDLE] = WAYS[os.environ[WAY]]()


_HANDLE = pytest.StashKey[Any]()


def _write(**fields: object) -> None:
    with open(os.environ[RESULTS], "a") as file:
        file.write(json.dumps(fields) + "\n")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write that a test begins: one that ends the process has no other outcome."""
    _write(test=item.nodeid, outcome="crashed", why="the process ended")
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome of a test, or of its setup or teardown that failed."""
    if report.when == "call" or report.outcome != "passed":
        why = ""
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(crash.message if crash else report.longrepr).strip().splitlines()[0][:300]
        _write(test=report.nodeid, outcome=report.outcome, why=why)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write that a file cannot be imported."""
    if report.failed:
        _write(test="", outcome="failed", why=str(report.longrepr).strip().splitlines()[-1][:300])
