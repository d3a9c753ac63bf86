"""Measured peaks of calls whose allocations are known."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fxckpt
from fxckpt import measure
from fxckpt.memory_meter import meter_of
from fxckpt.memory_meter.cpu import _process_meter


def test_counts_what_is_live_together() -> None:
    def two_of_three() -> None:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(500, dtype=torch.uint8)
        del a, b
        torch.empty(1200, dtype=torch.uint8)

    assert fxckpt.measure_peak(two_of_three) == 1500


def test_starts_from_zero_whatever_is_allocated() -> None:
    before = torch.empty(10_000, dtype=torch.uint8)
    assert fxckpt.measure_peak(lambda: torch.empty(64, dtype=torch.uint8)) == 64
    assert before.numel() == 10_000


def test_earlier_garbage_does_not_lower_the_peak() -> None:
    """Garbage that an earlier measurement left in a cycle does not lower the next peak."""

    def leave_a_cycle() -> None:
        cycle: list[object] = [torch.empty(1 << 18)]
        cycle.append(cycle)

    def collect_and_allocate() -> None:
        gc.collect()
        torch.empty(1 << 18)

    fxckpt.measure_peak(leave_a_cycle)
    assert fxckpt.measure_peak(collect_and_allocate) == 1 << 20


def test_frees_of_earlier_blocks_count() -> None:
    """Gradients of an earlier step that are freed inside make room for what follows."""
    weight = torch.nn.Parameter(torch.zeros(1000))
    weight.grad = torch.zeros(1000)

    def step() -> None:
        weight.grad = None
        torch.empty(1500)

    assert fxckpt.measure_peak(step) == 2000


def test_frees_of_other_threads_count() -> None:
    def hand_over() -> None:
        for _ in range(3):
            held = [torch.empty(1000, dtype=torch.uint8)]
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()

    assert fxckpt.measure_peak(hand_over) == 1000


def test_frees_of_gloo_threads_count(tmp_path: Path) -> None:
    """What C++ threads of a process group free makes room for what follows."""
    size, meter = 1 << 20, meter_of("cpu")

    def step() -> None:
        start = meter.allocated()
        for tensor in [torch.ones(size // 4) for _ in range(4)]:
            work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        del tensor, work
        # The group's threads drop their references some time after the result is there.
        while meter.allocated() > start:
            time.sleep(0.001)
        torch.ones(size)

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", world_size=1, rank=0)
    try:
        step()
        assert 4 * size <= fxckpt.measure_peak(step) < 4.01 * size
    finally:
        dist.destroy_process_group()


def test_profiler_gives_the_peak_without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    process = _process_meter()
    assert process is not None
    monkeypatch.setattr(measure, "meter_of", lambda device: process)
    assert fxckpt.measure_peak(lambda: torch.empty(1000).exp()) == 8000


FRESH_PROCESS = """
import ctypes, json, re, shutil, sys, threading, torch, fxckpt
from fxckpt.memory_meter import meter_of
from fxckpt.memory_meter.library import load_library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

def resident(name):
    with open("/proc/self/status") as status:
        return int(re.search(name + r":\\s+(\\d+) kB", status.read())[1]) << 10

torch.set_num_threads(1)
weight = torch.nn.Parameter(torch.ones(2048, 2048))
x = torch.ones(2048, 2048)

def step():
    a = (weight * x).exp()
    held = [torch.ones(1 << 22)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    weight.grad = None
    a.sin().cos().sum().backward()

step()  # leaves gradients, and loads what a first call loads
fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(x[:3])
assert not isinstance(fake.untyped_storage().nbytes(), int)
grown = torch.empty(100, dtype=torch.uint8)
alias = grown[10:]
before = meter_of("cpu").allocated()
grown.resize_(1000)
earlier = before, meter_of("cpu").allocated() - before
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
start = resident("VmRSS")
peak = fxckpt.measure_peak(step)
kernel = resident("VmHWM") - start
# A second copy of the library is another allocator that somebody sets.
ctypes.PyDLL(shutil.copy(load_library()._name, sys.argv[1])).fxckpt_install()
other = meter_of("cpu").exact, fxckpt.measure_peak(lambda: torch.empty(250))
print(json.dumps([earlier, peak, kernel, other]))
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel keeps no high-water mark"
)
def test_fresh_process_agrees_with_kernel(tmp_path: Path) -> None:
    """Tensors from before the meter count; a step's peak is the kernel's within 2 %.

    Once another allocator is set, the profiler gives the peak.
    """
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(tmp_path / "other.so")],
        check=True,
        capture_output=True,
        text=True,
        # malloc gives every large block back to the kernel once it is free.
        env=dict(
            os.environ, PYTHONPATH=os.pathsep.join(sys.path), MALLOC_MMAP_THRESHOLD_=str(1 << 16)
        ),
    )
    earlier, measured, kernel, other = json.loads(done.stdout.splitlines()[-1])
    assert earlier == [3 * (16 << 20) + 100, 900]  # weight, gradient and x
    assert measured > 60 << 20
    assert abs(measured - kernel) < 0.02 * measured
    assert other == [False, 1000]
