"""The command as a process: help, a full disk, plain terminals and interrupts."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest


def test_help_of_module() -> None:
    """The help of the module has examples and the exit codes."""
    done = subprocess.run(
        [sys.executable, "-m", "fxckpt", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert (
        "fxckpt plan train.py:make_step --budget 2GiB" in done.stdout
        and "exit codes" in done.stdout
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without room")
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_full_disk_exits_2(more: list[str]) -> None:
    """A full disk exits with 2 and one message."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fxckpt", "doctor", "--quick", *more],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr == "fxckpt: cannot write to the standard output: No space left on device\n"


def test_ascii_terminal(step: str) -> None:
    """Characters that the terminal lacks are printed as question marks."""
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-m", "fxckpt", "plan", f"{step}:make", "--cost", "flops"],
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0 and b"?" in done.stdout


def restore_sigint() -> None:
    """Restore the default SIGINT, which background jobs of a shell ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


SCRIPT = "import sys; from fxckpt.cli import main; sys.exit(main())"
"""The console script ``fxckpt`` as pip writes it."""


@pytest.mark.parametrize("started", [["-m", "fxckpt"], ["fxckpt"]], ids=["module", "script"])
def test_interrupt_during_imports(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt during the imports exits with 130 and one line."""
    (tmp_path / "fxckpt").write_text(SCRIPT)
    (tmp_path / "torch.py").write_text(
        "import time; print('importing', flush=True); time.sleep(60)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, *started],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_sigint,
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "importing\n"
        running.send_signal(signal.SIGINT)
        _, said = running.communicate()
    assert (running.returncode, said) == (130, "fxckpt: interrupted\n")


def test_import_keeps_interrupt_handler() -> None:
    """Importing the package keeps Python's interrupt handler."""
    code = (
        "import signal, fxckpt; "
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=restore_sigint,
        ).stdout
        == "True\n"
    )


def test_interrupt_in_user_code(step: str) -> None:
    """An interrupt in the user's code exits with 130 and one line."""
    Path(step).write_text(
        "import time\ndef make():\n    print('working', flush=True)\n    time.sleep(60)"
    )
    command = [sys.executable, "-m", "fxckpt", "plan", f"{step}:make"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_sigint,
    ) as running:
        assert running.stderr is not None and running.stderr.readline() == "working\n"
        running.send_signal(signal.SIGINT)
        assert running.stderr.read() == "fxckpt: interrupted\n"
    assert running.returncode == 130
