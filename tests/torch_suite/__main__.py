"""Run torch's own test files with fxckpt in place of parts of torch, beside stock torch.

    make torch-tests TORCH_SRC=path/to/pytorch
    python -m tests.torch_suite path/to/pytorch --ways checkpoint test/test_autograd.py:checkpoint

``path`` is a checkout of torch, at the version that is installed. A file stands for its tests, and
``file:words`` for those that ``pytest -k words`` selects. Each file runs once in each way (see
``ways.py``) in a process of its own; a test counts as different if stock passes it and fxckpt does
not, or the other way around.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from tests.torch_suite.devices import on_cpu
from tests.torch_suite.plugin import RESULTS, WAY

ROOT = Path(__file__).parents[2]
WAYS = ("checkpoint", "backend", "floor", "partitioner")
FILES = (
    "test/test_autograd.py:checkpoint",
    "test/dynamo/test_activation_checkpointing.py",
    "test/dynamo/test_aot_autograd.py",
    "test/dynamo/test_autograd_function.py",
    "test/distributed/_composable/test_checkpoint.py",
    "test/distributed/fsdp/test_checkpoint_wrapper.py",
    "test/functorch/test_ac.py",
    "test/functorch/test_aotdispatch.py:not Exhaustive",
    "test/functorch/test_control_flow.py",
    "test/inductor/test_torchinductor.py:CpuTests and (dropout or mutation or alias or view)",
)
"""Files that run if none is named, those of them that the checkout has."""
PROCESSES = 8
"""Processes started for one file in one way, where tests end them."""


@dataclass(frozen=True)
class Outcome:
    """What became of one test."""

    result: str
    """passed, failed, skipped or crashed."""
    why: str
    """First line of its error."""


@dataclass(frozen=True)
class Comparison:
    """The outcomes of one file in one way, beside those of stock torch."""

    file: str
    way: str
    stock: dict[str, Outcome]
    ours: dict[str, Outcome]

    @property
    def differing(self) -> list[str]:
        """Names of the tests that pass in one run only."""
        return [
            name
            for name in sorted(self.stock.keys() | self.ours.keys())
            if is_passed(self.stock.get(name)) != is_passed(self.ours.get(name))
        ]

    def row(self) -> tuple[str, str, int, int, int, int]:
        """Return the line of the table."""
        return (
            self.file,
            self.way,
            len(self.stock),
            sum(map(is_passed, self.stock.values())),
            sum(map(is_passed, self.ours.values())),
            len(self.differing),
        )


def is_passed(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.result == "passed"


def staged(source: Path, file: str, folder: Path, device: str) -> Path:
    """Return the path of a test file in ``folder``, beside links to its neighbours.

    Torch's tests import one another, and must not see the checkout's own ``torch``.
    """
    here, there = folder, source
    for part in Path(file).parts:
        here.mkdir(exist_ok=True)
        for entry in there.iterdir():
            if entry.name != part and there != source:
                (here / entry.name).symlink_to(entry.resolve())
        here, there = here / part, there / part
    here.write_text(on_cpu(there.read_text(), device) if device else there.read_text())
    return here


def run_file(source: Path, chosen: str, way: str, device: str, timeout: int) -> dict[str, Outcome]:
    """Run one file in one way; return the outcome of each test.

    The tests after one that ends the process, or that outlasts ``timeout``, run in a new process.
    """
    file, _, words = chosen.partition(":")
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = staged(source.resolve(), file, folder / "torch-tests", device)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.torch_suite.plugin"]
        command += ["-p", "no:cacheprovider", "--noconftest", "--import-mode=importlib"]
        command += ["-c", os.devnull, "--rootdir", str(path.parent), "--timeout", "120", str(path)]
        command += ["-k", words] if words else []
        for _ in range(PROCESSES):
            done = [f"--deselect={test}" for test in outcomes]
            found = _run_process([*command, *done], folder, path, way, timeout)
            outcomes |= found
            if not any(outcome.result == "crashed" for outcome in found.values()):
                break
    return {test.partition("::")[2].replace("::", "."): one for test, one in outcomes.items()}


def _run_process(
    command: list[str], folder: Path, path: Path, way: str, timeout: int
) -> dict[str, Outcome]:
    """Run pytest once; return the outcomes by node id. A process without any ends the program."""
    results = folder / "results"
    results.write_text("")
    python_path = [str(ROOT), str(path.parent), str(folder / "torch-tests" / "test")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*python_path, os.environ.get("PYTHONPATH", "")]),
        "FXCKPT_STRICT": "1",
        WAY: way,
        RESULTS: str(results),
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outcomes = dict(read(results))
    if not outcomes and process.returncode not in (0, 5):  # 5: no test was selected
        raise SystemExit((folder / "log").read_text()[-2000:])
    return outcomes


def read(results: Path) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome of each test, later ones in place of earlier ones."""
    for line in results.read_text().splitlines():
        fields = json.loads(line)
        yield fields["test"], Outcome(fields["outcome"], fields["why"])


def tests_of(source: Path, asked: list[str]) -> list[str]:
    """Return the files to run; end the program in one line if the checkout lacks them."""
    chosen = [one for one in asked or FILES if (source / one.partition(":")[0]).is_file()]
    if not chosen or (asked and len(chosen) < len(asked)):
        missing = ", ".join(one for one in asked if one not in chosen) or "test/test_autograd.py"
        raise SystemExit(
            f"{source} has no {missing}: give a checkout of torch with its tests, "
            "make torch-tests TORCH_SRC=path/to/pytorch."
        )
    return chosen


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tests.torch_suite")
    parser.add_argument("source", type=Path, help="a checkout of torch")
    parser.add_argument("files", nargs="*", help="test/a.py or test/a.py:words")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated")
    parser.add_argument("--on-cpu", default="", metavar="DEVICE", help="run its cases on the CPU")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for a file in a way")
    given = parser.parse_intermixed_args(arguments)
    ways = given.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"unknown ways {', '.join(sorted(unknown))}: use {', '.join(WAYS)}")
    rows = []
    for file in tests_of(given.source, given.files):
        stock = run_file(given.source, file, "stock", given.on_cpu, given.timeout)
        if "" in stock:
            print(f"{file}: {stock[''].why}", flush=True)
        for way in ways:
            ours = run_file(given.source, file, way, given.on_cpu, given.timeout)
            comparison = Comparison(file, way, stock, ours)
            rows.append(comparison.row())
            for name in comparison.differing:
                one, other = stock.get(name), ours.get(name)
                print(f"{file} {way}: {name}")
                print(f"    stock {one and one.result}  {one and one.why}")
                print(f"    ours  {other and other.result}  {other and other.why}", flush=True)
    print(tabulate(rows, ["file", "way", "tests", "stock passes", "ours passes", "differ"]))


if __name__ == "__main__":
    main()
