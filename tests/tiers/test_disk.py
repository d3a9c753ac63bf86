"""The disk: files without names, space that is taken first, and clear errors."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fxckpt
from fxckpt.tiers import Disk
from fxckpt.tiers.ops import fetch, fetched, send, sent


def test_a_value_comes_back_from_the_disk(tmp_path: Path) -> None:
    """Bits are kept, and the folder shows no file while a value is away."""
    disk = Disk(tmp_path, "1MiB", 1e9)
    value = torch.randn(50, 70).t()
    held = sent(send(value, disk.number), value, disk.number)
    assert os.listdir(tmp_path) == []
    back = fetched(fetch(held, disk.number, torch.device("cpu")), held, disk.number)
    assert torch.equal(back, value) and back.stride() == value.stride()
    assert disk.used_bytes == value.nbytes
    del held
    assert disk.used_bytes == 0


def test_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk has no space, nothing is in use after the error, and the next value fits."""
    disk = Disk(tmp_path, "1MiB", 1e9)
    with monkeypatch.context() as patch:

        def full(fd: int, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(fxckpt.TierFull, match="has no room for 1000 B more, with 0 B of it"):
            disk.take(1000)
    assert disk.used_bytes == 0
    assert disk.take(1000).nbytes == 1000


def test_a_folder_is_a_path() -> None:
    with pytest.raises(fxckpt.InvalidOption, match=r"Disk\(None\): that is no path"):
        Disk(None, "1MiB")  # type: ignore[arg-type]
    with pytest.raises(fxckpt.InvalidOption, match="names no folder"):
        Disk("", "1MiB")
    with pytest.raises(fxckpt.InvalidOption, match=r"no file can be made there: .*null"):
        Disk("a\0", "1MiB")


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_folder_is_needed(tmp_path: Path, name: str) -> None:
    """A path that is missing, or a file, is refused when the tier is made."""
    (tmp_path / "file").touch()
    with pytest.raises(fxckpt.InvalidOption, match="no file can be made there"):
        Disk(tmp_path / name, "1MiB")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_must_be_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(fxckpt.InvalidOption, match="this process may write to"):
        Disk(tmp_path, "1MiB")


def test_files_are_gone_after_a_crash(tmp_path: Path) -> None:
    """A process that is killed with values away leaves no file and takes no space."""
    code = (
        "import os, torch\n"
        "from fxckpt.tiers import Disk\n"
        f"held = Disk({str(tmp_path)!r}, '8MiB', 1e9).take(2**22)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert os.listdir(tmp_path) == []


def test_rates_of_the_disk_are_measured(tmp_path: Path) -> None:
    disk = Disk(tmp_path, "64KiB")
    assert min(disk.rates()) > 0
    assert os.listdir(tmp_path) == []


def test_rates_are_measured_where_little_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are as small as the disk has room for, down to 1 MiB; less is an error."""
    disk, write, room = Disk(tmp_path, "1GiB"), os.fsync, 2**22
    sizes = []

    def scarce(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        if sizes[-1] > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(fd)

    monkeypatch.setattr(os, "fsync", scarce)
    assert min(disk.rates()) > 0
    assert sizes == [2**25, 2**23] + 5 * [2**21]
    room = 2**19
    with pytest.raises(fxckpt.TierFull, match=r"no room for 1.0 MiB more to measure its rates by"):
        Disk(tmp_path, "1GiB").rates()


def test_too_few_descriptors_are_told(tmp_path: Path) -> None:
    """Files that are idle are closed first; then the error says what is short."""
    code = (
        "import resource, fxckpt\n"
        f"disk = fxckpt.tiers.Disk({str(tmp_path)!r}, '1GiB', 1e9)\n"
        "held = [disk.take(4096) for _ in range(100)]\n"
        "held.clear()\n"
        "used = int(max(__import__('os').listdir('/proc/self/fd'), key=int)) + 2\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))\n"
        "held = [disk.take(4097) for _ in range(60)]\n"
        "try:\n"
        "    while True: held.append(disk.take(1))\n"
        "except fxckpt.TierFull as error:\n"
        "    assert 'no file descriptors left for one of 1 B' in str(error)\n"
        "    assert 'ulimit -n' in str(error) and disk.reserved_bytes == disk.used_bytes\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_disk_prints_as_it_was_made(tmp_path: Path) -> None:
    assert repr(Disk(tmp_path, "1MiB", 5.0)) == (
        f"fxckpt.tiers.Disk({str(tmp_path)!r}, '1MiB', bytes_per_second=5.0)"
    )
