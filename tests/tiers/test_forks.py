"""A process that forks and its child write to no memory that the other one reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import os, torch
from fxckpt.tiers import Disk, Host, Throttled
from fxckpt.tiers.ops import fetch, fetched, send, sent

def forked(run):
    '''Run a function in a child and wait for it; fail if it fails.'''
    child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
PLACES = pytest.mark.parametrize("place", ["Disk({folder!r}, '1MiB', 1e9)", "Host('1MiB', 1e9)"])


def run(script: str, place: str, folder: Path) -> None:
    """Run a script in a process of its own, with a tier."""
    tier = f"tier = {place.format(folder=str(folder))}\n"
    subprocess.run([sys.executable, "-c", BEGIN + tier + script], check=True, timeout=120)


@PLACES
def test_child_leaves_idle_blocks_alone(place: str, tmp_path: Path) -> None:
    """What the child takes is not what the parent takes, though both find one block idle."""
    script = """
tier.take(1000)
assert tier.reserved_bytes == 1000
go, begin = os.pipe()
child = os.fork()
if child == 0:
    assert tier.reserved_bytes == 0
    os.read(go, 1)
    tier.take(1000).fill_(1)
    os._exit(0)
mine = tier.take(1000).fill_(2)
os.write(begin, b"1")
assert os.waitpid(child, 0)[1] == 0
assert mine.eq(2).all()
"""
    run(script, place, tmp_path)


@PLACES
def test_values_away_stay_for_both(place: str, tmp_path: Path) -> None:
    """What is in use at a fork is lent again by neither process."""
    script = """
held = [tier.take(1000).fill_(7)]

def child():
    held.clear()
    tier.take(1000).fill_(1)

forked(child)
assert held[0].eq(7).all()
go, begin = os.pipe()
child = os.fork()
if child == 0:
    os.read(go, 1)
    assert held[0].eq(7).all()
    os._exit(0)
held.clear()
tier.take(1000).fill_(2)
os.write(begin, b"1")
assert os.waitpid(child, 0)[1] == 0
assert tier.used_bytes == 0
"""
    run(script, place, tmp_path)


@pytest.mark.parametrize("way", ["send", "fetch"])
def test_child_ends_copies_under_way(way: str, tmp_path: Path) -> None:
    """No thread of the child does; both processes have the value."""
    script = f"""
value = torch.randn(50_000)
held = send(value, tier.number)
if {way!r} == "fetch":
    sent(held, value, tier.number)
    back = fetch(held, tier.number, value.device)

def end():
    if {way!r} == "send":
        assert torch.equal(sent(held, value, tier.number), value)
    else:
        assert torch.equal(fetched(back, held, tier.number), value)

forked(end)
end()
"""
    run(script, "Throttled('1MiB', 2e5)", tmp_path)
