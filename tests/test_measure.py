"""``measure_peak`` against programs whose allocations are known."""

from __future__ import annotations

import pytest
import torch

from fxckpt import measure_peak

# A multiple of every allocator's rounding (CPU: 64 bytes, CUDA: 2 MiB blocks), so that requested bytes are allocated bytes.
BIG = 4 * 2**20


def make(nbytes: int = BIG, device: str = "cpu") -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def test_nothing_allocated_is_zero() -> None:
    assert measure_peak(lambda: None) == 0


def test_values_alive_together_add_up() -> None:
    assert measure_peak(lambda: [make(), make(), make()]) == 3 * BIG


def test_values_alive_one_after_another_share_the_peak() -> None:
    def one_at_a_time() -> None:
        for _ in range(5):
            value = make()
            del value

    assert measure_peak(one_at_a_time) == BIG


def test_the_peak_is_counted_though_it_is_freed_before_the_end() -> None:
    def rise_and_fall() -> torch.Tensor:
        first, second = make(), make(2 * BIG)
        del first, second
        return make()

    assert measure_peak(rise_and_fall) == 3 * BIG


def test_what_was_allocated_before_does_not_count() -> None:
    held = make(8 * BIG)
    assert measure_peak(lambda: make()) == BIG
    assert held.numel() == 8 * BIG


def release_and_allocate(held: list[torch.Tensor]) -> int:
    def replace() -> torch.Tensor:
        held.clear()
        return make(3 * BIG)

    return measure_peak(replace)


def test_releasing_what_an_earlier_measurement_allocated_gives_room() -> None:
    held: list[torch.Tensor] = []
    measure_peak(lambda: held.append(make(2 * BIG)))
    assert release_and_allocate(held) == BIG


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="CUDA's statistics see every release")
def test_on_the_cpu_releasing_what_was_never_seen_gives_no_room() -> None:
    # torch's profiler cannot size such a block: the answer is too high (exact: BIG), never too low.
    assert release_and_allocate([make(2 * BIG)]) == 3 * BIG


def test_views_cost_nothing() -> None:
    held = make()
    assert measure_peak(lambda: [held.view(2, -1), held[3:], held.expand(4, -1)]) == 0


def test_saved_activations_and_gradients_count() -> None:
    x = torch.zeros(BIG // 4, requires_grad=True)

    def step() -> None:
        # Forward: sin and its output, both BIG. Backward: the gradient, after both factors are made.
        x.sin().sum().backward()

    peak = measure_peak(step)
    assert peak >= 2 * BIG
    assert x.grad is not None


def test_an_error_in_the_program_reaches_the_caller() -> None:
    def fail() -> None:
        raise RuntimeError("in the program")

    with pytest.raises(RuntimeError, match="in the program"):
        measure_peak(fail)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_cuda_allocator_is_read_on_cuda() -> None:
    held = make(device="cuda")

    def rise_and_fall() -> torch.Tensor:
        first, second = make(device="cuda"), make(device="cuda")
        del first, second
        return make(device="cuda")

    assert measure_peak(rise_and_fall) == 2 * BIG
    assert held.is_cuda
