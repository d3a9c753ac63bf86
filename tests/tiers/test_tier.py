"""Tiers lend blocks, count them, and copy in order."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import fxckpt
from fxckpt.tiers import Disk, Host, Throttled, tier_of
from fxckpt.tiers.ops import fetch, fetched, send, sent


def test_a_block_lives_as_long_as_tensors() -> None:
    """Views keep a block; the last one gives it back, and the next of its size is the same."""
    host = Host("1MiB", 1e9)
    block = host.take(1000)
    view, address = block.view(torch.float32)[3:], block.data_ptr()
    del block
    assert host.used_bytes == 1000
    del view
    assert host.used_bytes == 0
    again = host.take(1000)
    assert again.data_ptr() == address
    assert (host.used_bytes, host.peak_bytes) == (1000, 1000)


def test_the_device_does_not_count_a_block() -> None:
    """What is taken of a host is no part of a measured peak."""
    host = Host("64MiB", 1e9)
    assert fxckpt.measure_peak(lambda: host.take(2**22).fill_(1)) == 0


def test_a_full_tier_says_so() -> None:
    """More than the limit is refused, and what failed is not in use."""
    host = Host("1000B", 1e9)
    held = host.take(600)
    with pytest.raises(fxckpt.TierFull, match=r"asked for 600 B, and 600 B of it are in use"):
        host.take(600)
    assert host.used_bytes == 600
    del held
    host.take(1000)


def test_idle_blocks_make_room() -> None:
    """Blocks of other sizes that were given back do not count against the limit."""
    host = Host("1000B", 1e9)
    for nbytes in (600, 700, 800, 900):
        host.take(nbytes)
    assert host.used_bytes == 0


def test_idle_memory_is_within_the_peak() -> None:
    """Sizes that change leave no more idle than was in use at once; steady ones find theirs."""
    host = Host("1GiB", 1e9)
    for nbytes in (*range(1000, 3000, 100), *range(3000, 1000, -100)):
        held = [host.take(nbytes + i) for i in range(3)]
        assert host.reserved_bytes <= host.peak_bytes
        del held
    assert host.reserved_bytes <= host.peak_bytes == 3 * 3000 + 3
    addresses = []
    for _ in range(2):
        held = [host.take(1100 + i) for i in range(3)]
        addresses.append({block.data_ptr() for block in held})
        del held
    assert addresses[0] == addresses[1]


def test_idle_blocks_go_where_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine refuses is asked for again once nothing is idle; then it is an error."""
    host = Host("1MiB", 1e9)
    first, second = host.take(1000), host.take(2000)
    new_block = Host._new_block

    def scarce(self: Host, nbytes: int) -> object:
        if self.reserved_bytes > 1500:
            raise fxckpt.TierFull("none left")
        return new_block(self, nbytes)

    monkeypatch.setattr(Host, "_new_block", scarce)
    del first, second
    held = host.take(1500)
    assert host.reserved_bytes == 1500
    with pytest.raises(fxckpt.TierFull, match="none left"):
        host.take(100)
    assert (host.used_bytes, held.nbytes) == (1500, 1500)
    assert host.peak_bytes == 3000


def test_a_machine_without_memory_says_so() -> None:
    host = Host(2**62, 1e9)
    with pytest.raises(fxckpt.TierFull, match="the machine has no"):
        host.take(2**60)
    assert host.used_bytes == 0


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(5, 7),
        torch.randn(5, 7).t(),
        torch.randn(40)[3:38:5],
        torch.randn(3, 1).expand(3, 4),
        torch.arange(6, dtype=torch.int16),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(4, dtype=torch.complex64).conj().imag,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(float("nan")),
    ],
    ids=[
        "contiguous",
        "transposed",
        "strided",
        "expanded",
        "int16",
        "conjugate",
        "negative",
        "channels last",
        "nan",
    ],
)
def test_a_value_comes_back_as_it_was(value: torch.Tensor) -> None:
    """Bits, strides, offset and the size of the storage are kept."""
    host = Host("1MiB", 1e9)
    held = sent(send(value, host.number), value, host.number)
    back = fetched(fetch(held, host.number, torch.device("cpu")), held, host.number)
    assert torch.equal(back, value) or value.isnan().all()
    assert (back.stride(), back.storage_offset()) == (value.stride(), value.storage_offset())
    assert back.untyped_storage().nbytes() == value.untyped_storage().nbytes()
    assert back.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    del held
    assert host.used_bytes == 0


def test_a_copy_that_was_sent_is_refused() -> None:
    """An executor that copies what ``send`` reads may free the copy before it is sent."""
    host = Host("1MiB", 1e9)
    value = torch.randn(1000)
    held = send(value.clone(), host.number)
    with pytest.raises(fxckpt.OffloadMismatch, match=r"\(1000,\) values were copied for the op"):
        sent(held, value, host.number)
    assert not sent(send(value, host.number), value, host.number).isnan().any()
    del held
    assert host.used_bytes == 0 == len(host.sources)


def test_a_send_that_nobody_awaits_leaks_nothing() -> None:
    """The block is given back when its copy has ended."""
    host = Throttled("1MiB", 1e8)
    value = torch.randn(1000)
    send(value, host.number)
    done = send(value, host.number)
    sent(done, value, host.number)
    del done
    gc.collect()
    assert host.used_bytes == 0
    assert not host.copies


def test_a_value_is_free_when_it_is_sent() -> None:
    """No thread holds a value whose copy counts as complete."""
    host = Host("1MiB", 1e9)
    value = torch.randn(1000)
    storage = value.untyped_storage()
    held = send(value, host.number)
    sent(held, value, host.number)
    del value
    assert storage.nbytes() == 4000 and torch._C._storage_Use_Count(storage._cdata) <= 2


def test_a_throttled_link_takes_its_time() -> None:
    """Three copies of 10 kB at 1 MB/s take at least 30 ms one after another."""
    host = Throttled("1MiB", 1e6)
    value = torch.zeros(10_000, dtype=torch.uint8)
    begin = time.perf_counter()
    held = [send(value, host.number) for _ in range(3)]
    for each in held:
        sent(each, value, host.number)
    assert time.perf_counter() - begin >= 0.03


def test_rates_are_measured_once() -> None:
    """A tier that was given no rates copies once to find them, and holds nothing after."""
    host = Host("1MiB")
    first = host.rates()
    assert min(first) > 0 and host.rates() == first
    assert host.used_bytes == 0


def test_measuring_neither_counts_nor_needs_room() -> None:
    """A tier in use is measured, and what was lent for it is no part of what was sent."""
    host = Host("1MiB")
    held = host.take(2**20)
    assert min(host.rates()) > 0
    assert host.used_bytes == host.peak_bytes == host.reserved_bytes == held.nbytes
    assert not host.copies


def test_copies_of_what_was_sent_leave_nothing() -> None:
    """A hook that clones what was sent gets the value back, and no entry stays for the clone."""
    host = Host("1MiB", 1e9)
    value = torch.randn(10)
    clone = sent(send(value, host.number), value, host.number).clone()
    for _ in range(2):
        back = fetched(fetch(clone, host.number, value.device), clone, host.number)
        assert torch.equal(back, value)
    assert host.used_bytes == 0 == len(host.copies)


def test_threads_end_with_the_tier() -> None:
    """The threads of a tier that is gone end."""
    host = Host("1MiB", 1e9)
    value, number = torch.zeros(10), host.number
    sent(send(value, number), value, number)
    names = {t.name for t in threading.enumerate() if t.name.startswith(f"fxckpt-send-{number}")}
    assert names
    threads = [t for t in threading.enumerate() if t.name in names]
    del host
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("limit", ["much", "60%", 0.5, "auto", -1, 0, None, "min"])
def test_a_limit_is_a_number_of_bytes(limit: object) -> None:
    with pytest.raises(fxckpt.InvalidOption, match="its limit is a number of bytes, more than 0"):
        Host(limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), "fast", (1.0, 2.0, 3.0), True, 10**400])
def test_a_rate_is_a_positive_number(rate: object) -> None:
    with pytest.raises(fxckpt.InvalidOption, match="is not a rate"):
        Host("1MiB", rate)  # type: ignore[arg-type]


def test_a_throttled_host_is_given_its_rates() -> None:
    with pytest.raises(fxckpt.InvalidOption, match=r"Throttled\('1MiB', None\): its rates"):
        Throttled("1MiB", None)  # type: ignore[arg-type]


def test_a_tier_prints_as_it_was_made() -> None:
    assert repr(Host("1MiB")) == "fxckpt.tiers.Host('1MiB')"
    assert repr(Throttled(5, (1.0, 2.0))) == (
        "fxckpt.tiers.Throttled(5, bytes_per_second=(1.0, 2.0))"
    )
    assert tier_of("1MiB").limit_bytes == 2**20  # type: ignore[union-attr]


def test_equal_tiers_have_known_numbers() -> None:
    """The n-th of equal tiers has one number in every process, and no two have the same."""
    script = (
        "from fxckpt.tiers import Host; Host('3KiB', 1e9).number;"
        "print(*(Host('77KiB', 1e9).number for _ in range(2)))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    ((first, second),) = (text.split() for text in found)
    assert first != second
    assert Host("78KiB", 1e9).number not in (int(first), int(second))


def test_a_tier_that_is_gone_is_named() -> None:
    """What was compiled for the tier of another process says so."""
    number = Host("1KiB", 1e9).number
    gc.collect()
    with pytest.raises(fxckpt.InvalidOption, match=rf"to tier {number}, which this process does"):
        send(torch.randn(3), number)


def test_a_pickled_tier_is_an_equal_one(tmp_path: Path) -> None:
    for tier in (Host("1KiB", 1e9), Throttled("2KiB", (1e9, 2e9)), Disk(tmp_path, "1MiB")):
        again = pickle.loads(pickle.dumps(tier))
        assert again is not tier and repr(again) == repr(tier)
        assert copy.deepcopy(tier) is tier


def test_the_host_holds_all_that_is_sent() -> None:
    host = tier_of("host")
    assert isinstance(host, Host) and host.limit_bytes == 2**62
