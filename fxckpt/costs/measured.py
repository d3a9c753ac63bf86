"""Measured times of ops on this machine, measured once and cached on disk.

Records are keyed by machine, torch version and call, so that every process of a machine plans with
the same figures.
"""

from __future__ import annotations

import itertools
import logging
import math
import platform
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from fxckpt.costs.isolated_op import REFUSED, IsolatedOp, devices
from fxckpt.errors import InvalidOption
from fxckpt.torch_private import outside_trace
from fxckpt.utils.cache_folder import cache_dir, warn_once

log = logging.getLogger("fxckpt")

CALIBRATION_SECONDS = 0.3
"""Seconds spent on each figure of a roofline; guess."""

TRIAL_SECONDS = 0.01
"""Least seconds spent on each distinct op; guess."""


@dataclass(frozen=True)
class Records:
    """Positive figures (seconds, rates) by key, in an SQLite file that processes may share."""

    path: Path

    @classmethod
    def of_machine(cls) -> Records:
        """Return the records in the cache folder."""
        return cls(cache_dir() / "timings.sqlite3")

    def get(self, key: str) -> float | None:
        """Return the figure of ``key``, or None if there is no positive one."""
        if not self.path.exists():
            return None
        with closing(self._open()) as db:
            row = db.execute("select figure from records where key = ?", (key,)).fetchone()
        return row[0] if row is not None and isinstance(row[0], float) and row[0] > 0 else None

    def keep(self, key: str, figure: float) -> float:
        """Store a figure and return the stored one: one that another process stored first stays."""
        self.keep_all({key: figure})
        return self.get(key) or figure

    def keep_all(self, figures: Mapping[str, float], *, is_replaced: bool = False) -> None:
        """Store figures, all of them or, where that raises, none.

        A figure that another process stored first stays, unless it ``is_replaced``.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with closing(self._open()) as db, db:
            # Takes the lock for writing, also where there is nothing to store.
            db.execute("begin immediate")
            db.executemany(
                "insert into records values (?, ?) "
                "on conflict (key) do update set figure = excluded.figure "
                "where ? or typeof(figure) != 'real' or figure <= 0",
                [(key, float(figure), is_replaced) for key, figure in figures.items()],
            )

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=5)
        try:
            with db:
                db.execute(
                    "create table if not exists records "
                    "(key text primary key, figure real not null)"
                )
        except sqlite3.Error:
            db.close()
            raise
        return db


def machine(device: torch.device) -> str:
    """Return the torch version and the processor, on which a figure depends beside the op."""
    processor = (
        f"cpu {platform.node()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} "
        f"{torch.get_num_threads()} threads"
    )
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    return f"torch {torch.__version__} {processor}"


def cpu_figures(records: Records) -> tuple[float, float, float, float]:
    """Return the CPU's figures: FLOP/s, bytes/s, seconds of a launch, random numbers per second.

    They come from an fp32 matrix product, an addition of vectors, an addition of one element, and
    Bernoulli draws. The first call measures them in about a second.
    """
    keys = _cpu_keys()
    found = [known(records, key) for key in keys]
    if None in found:
        measured = zip(keys, _calibrate(), strict=True)
        found = [kept(records, key, figure) for key, figure in measured]
    flops, bandwidth, launch, draws = (float(figure or 0.0) for figure in found)
    return flops, bandwidth, launch, draws


def calibrate_cpu(records: Records) -> tuple[float, float, float, float]:
    """Measure the CPU's figures, keep them in place of those that were kept, and return them.

    Raises :class:`InvalidOption` where they cannot be kept.
    """
    refuse_unwritable(records)
    figures = _calibrate()
    keep_measured(records, dict(zip(_cpu_keys(), figures, strict=True)))
    return figures


def _cpu_keys() -> list[str]:
    prefix = machine(torch.device("cpu"))
    return [f"{prefix} {name}" for name in ("FLOP/s", "bytes/s", "launch", "draws/s")]


def refuse_unwritable(records: Records) -> None:
    """Raise :class:`InvalidOption` where no figure can be stored."""
    keep_measured(records, {})


def keep_measured(records: Records, figures: Mapping[str, float]) -> None:
    """Store figures in place of those that were; raise :class:`InvalidOption` where that fails."""
    try:
        records.keep_all(figures, is_replaced=True)
    except (OSError, sqlite3.Error) as error:
        raise InvalidOption(
            f"figures cannot be kept in {records.path}: {error}. Set FXCKPT_CACHE_DIR to a folder "
            "that can be written."
        ) from error


def known(records: Records, key: str) -> float | None:
    """Return a figure, or None, with a warning, where the records cannot be read."""
    try:
        return records.get(key)
    except (OSError, sqlite3.Error) as error:
        warn_once(
            records.path,
            "cannot be read",
            error,
            "figures are measured again. Remove it, or set FXCKPT_CACHE_DIR.",
        )
        return None


def kept(records: Records, key: str, figure: float) -> float:
    """Store a figure and return the stored one; warn where the records cannot be written."""
    try:
        return records.keep(key, figure)
    except (OSError, sqlite3.Error) as error:
        warn_once(
            records.path,
            "cannot be written",
            error,
            "every process measures its own figures. Set FXCKPT_CACHE_DIR.",
        )
        return figure


def _calibrate() -> tuple[float, float, float, float]:
    """Measure the CPU's figures in short runs.

    On a busy machine some short runs are undisturbed; no long one would be.
    """
    with outside_trace(), torch.no_grad():
        side, length, pieces = 256, 2**21, 8
        matrix, product = torch.ones(side, side), torch.empty(side, side)
        # Cycled, so that each vector has left the caches before its next use.
        vectors = itertools.cycle(
            [(torch.ones(length), torch.empty(length)) for _ in range(pieces)]
        )
        drawn = torch.ones(2**16)
        flops = 2 * side**3 / _fastest(lambda: torch.mm(matrix, matrix, out=product))
        bandwidth = 12 * length / _fastest(lambda: _add(*next(vectors)))
        launch = _seconds("torch.add(a, a)", {"a": torch.ones(1)}, CALIBRATION_SECONDS)
        # Dropout draws this way.
        # A generator of its own: the user's draws what it draws without calibration.
        generator = torch.Generator()
        draws = drawn.numel() / _fastest(lambda: drawn.bernoulli_(0.5, generator=generator))
    return flops, bandwidth, launch, draws


def _add(vector: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.add(vector, vector, out=total)


def _fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest single run, with all threads or with one.

    A busy machine may never run all threads at once.
    """
    threads, least, clock = torch.get_num_threads(), math.inf, _default_clock()
    try:
        for count in (threads, 1):
            torch.set_num_threads(count)
            call()
            end = clock() + CALIBRATION_SECONDS / 2
            while (begin := clock()) < end:
                call()
                least = min(least, clock() - begin)
    finally:
        torch.set_num_threads(threads)
    return least


def _default_clock() -> Callable[[], float]:
    """Return torch's clock, which waits for an accelerator's kernels."""
    # Not at the top: the import looks for a CUDA toolkit, and logs one that has no device.
    from torch.utils.benchmark.utils.timer import timer

    return timer


def _seconds(
    statement: str,
    names: dict[str, object],
    at_least: float,
    clock: Callable[[], float] | None = None,
) -> float:
    from torch.utils.benchmark import Timer

    timer = Timer(
        statement,
        timer=clock or _default_clock(),
        globals={"torch": torch, **names},
        num_threads=torch.get_num_threads(),
    )
    # Noise only adds to a time, so the least one is the estimate.
    return float(min(timer.blocked_autorange(min_run_time=at_least).times))


class MeasuredSeconds:
    """Measured seconds of ops, each distinct call timed once on the device of the plan."""

    def __init__(
        self,
        records: Records,
        device: torch.device,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.records = records
        self.device = device
        self.clock = clock
        self._known: dict[str, float | None] = {}

    def __call__(self, node: fx.Node) -> float | None:
        """Return the seconds of one run of ``node``, or None if it cannot run in isolation."""
        isolated = IsolatedOp.of(node)
        if isolated is None or not devices(node) <= {"cpu", self.device.type}:
            return None
        key = f"{machine(self.device)} {isolated.key}"
        if key not in self._known:
            seconds = known(self.records, key)
            if seconds is None:
                seconds = _measure(isolated, self.clock)
                seconds = None if seconds is None else kept(self.records, key, seconds)
            self._known[key] = seconds
        return self._known[key]


def _measure(isolated: IsolatedOp, clock: Callable[[], float] | None) -> float | None:
    try:
        with isolated.call() as call:
            call()
            return _seconds("call()", {"call": call}, TRIAL_SECONDS, clock)
    except REFUSED as error:
        log.info("%s not timed, estimated instead: %s", isolated.op, error)
        return None
