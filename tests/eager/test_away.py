"""Regions whose saved tensors are sent away: bits, bytes, races and errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt.memory_meter import meter_of
from fxckpt.tiers import Host, Throttled
from tests.tiers.adversary import Adversary, left_in

ROWS, WIDTH, BLOCKS = 512, 32, 4
INPUT = ROWS * WIDTH * 4
"""Bytes of a block's input."""
METER = meter_of(torch.device("cpu"))


class Block(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.drop = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(inner))  # type: ignore[no-any-return]


class Steps:
    """Steps of a stack of blocks, each in a region with some options."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.x = torch.randn(ROWS, WIDTH)
        self.options = options

    def forward(self, run: Callable[..., Tensor] | None = None) -> Tensor:
        torch.manual_seed(1)
        h = self.x
        for block in self.blocks:
            h = fxckpt.checkpoint(block, h, **self.options) if run is None else run(block, h)
        return h.square().mean()

    def gradients(self, run: Callable[..., Tensor] | None = None) -> list[Tensor]:
        self.blocks.zero_grad(set_to_none=True)
        self.forward(run).backward()
        return [p.grad for p in self.blocks.parameters() if p.grad is not None]

    def held(self) -> int:
        """Return the bytes that a forward holds for its backward."""
        before = METER.allocated()
        loss = self.forward()
        return METER.allocated() - before - loss.nbytes


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)  # type: ignore[no-any-return]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "inputs": ({}, {}, 0),
    "a policy of ops": (
        {"policy": fxckpt.policies.save_matmuls},
        {"policy": fxckpt.policies.save_matmuls},
        4 * INPUT,
    ),
    "a policy that sends": (
        {"policy": fxckpt.policies.offload("up")},
        {"policy": fxckpt.policies.save("up")},
        4 * INPUT,
    ),
}
"""Options of regions that send, of those that keep the same, and the bytes of results sent."""


@pytest.mark.parametrize(("options", "keeping", "results"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("late", [True, False])
def test_bits_and_bytes_on_any_link(
    options: dict[str, Any], keeping: dict[str, Any], results: int, late: bool
) -> None:
    """Gradients are those without regions; what is kept is away, each storage once."""
    expected = Steps().gradients(plainly)
    host = Adversary(late=late, owned=False)
    sending = Steps(offload=host, **options)
    assert same(sending.gradients(), expected)
    # The first region has no input that autograd computed; the last one's values never left.
    assert host.sent == (BLOCKS - 1) + BLOCKS * (results > 0)
    assert host.peak_bytes == (BLOCKS - 1) * INPUT + BLOCKS * results
    assert Steps(**keeping).held() - sending.held() == (BLOCKS - 2) * INPUT + (BLOCKS - 1) * results
    assert left_in(host) == 0
    assert same(sending.gradients(), expected)


def test_parameters_stay() -> None:
    """A region sends neither parameters nor views of them, nor what has no history."""
    host = Host("1GiB", 1e10)
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    fxckpt.checkpoint(lambda x: (x @ weight.t()).relu().sum(), x, offload=host).backward()
    assert host.peak_bytes == 0 and weight.grad is not None


def test_views_of_one_storage_move_once() -> None:
    """Views are rebuilt from the storage that came back, twice for two backwards."""
    host = Adversary(late=True, owned=False)
    x = torch.randn(6, 8, requires_grad=True)

    def region(h: Tensor) -> Tensor:
        return (h[:3] * h[3:]).sin().sum() + (h.t() @ h).cos().sum()

    def gradients(**options: Any) -> list[Tensor]:
        h, other = x * 2, x * 3
        out = fxckpt.checkpoint(region, h, **options)
        out = out + fxckpt.checkpoint(torch.sin, other, **options).sum()
        del h, other
        found = [torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2)]
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        return [*found, torch.autograd.grad(first.sum(), x)[0]]

    expected = gradients()
    assert same(gradients(offload=host), expected)
    assert (host.sent, host.peak_bytes) == (2, 2 * x.nbytes)
    assert host.fetched >= 3
    assert left_in(host) == 0


def test_a_write_before_the_copy_is_an_error() -> None:
    """What is written while it may be on its way is refused in the backward; later it is fine."""
    host = Throttled("1GiB", 1e9)

    def step(write_late: bool) -> Tensor:
        x = torch.ones(4, requires_grad=True)
        h = x * 2
        out = fxckpt.checkpoint(torch.sin, h, offload=host).sum()
        if not write_late:
            with torch.no_grad():
                h.mul_(3)
        out = out + fxckpt.checkpoint(torch.sin, x * 5, offload=host).sum()
        with torch.no_grad():
            h.mul_(3)
        out.backward()
        assert x.grad is not None
        return x.grad

    with pytest.raises(fxckpt.CheckpointError, match="written in place"):
        step(write_late=False)
    x = torch.ones(4)
    assert torch.equal(step(write_late=True), 2 * (2 * x).cos() + 5 * (5 * x).cos())
    assert left_in(host) == 0


def test_a_full_place_leaks_nothing() -> None:
    """The region raises, and the next step, with room, is right."""
    host = Host(INPUT, 1e10)
    sending = Steps(offload=host)
    with pytest.raises(fxckpt.TierFull, match="Raise its limit"):
        sending.gradients()
    assert left_in(host) == 0
    sending.options = {"offload": "1GiB"}
    assert same(sending.gradients(), Steps().gradients(plainly))


def test_a_forward_without_backward_leaks_nothing() -> None:
    """What was sent is given back with the graph that would have read it."""
    host = Host("1GiB", 1e10)
    loss = Steps(offload=host).forward()
    assert host.used_bytes == (BLOCKS - 1) * INPUT
    del loss
    assert left_in(host) == 0


def test_a_report_tells_what_is_away() -> None:
    """Rows of results that are sent say so, and the heading sums their bytes."""
    host = Host("1GiB", 1e10)
    with fxckpt.record_regions() as regions:
        Steps(offload=host, policy=fxckpt.policies.offload("up")).gradients()
    assert [row.module for row in regions[0].rows if row.what == "sent away"] == ["up"]
    assert "256.0 KiB sent away" in str(regions[0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload": 3}, "not a place to send"),
        ({"offload": "1GiB", "engine": "rerun"}, "sends nothing away"),
        ({"policy": fxckpt.policies.offload("up")}, "there is no offload="),
        ({"policy": fxckpt.policies.offload("up"), "offload": "1GiB", "budget": 0.9}, "no budget"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], text: str) -> None:
    """The error says what is wrong and what to do."""
    with pytest.raises(fxckpt.InvalidOption, match=text):
        Steps(**options).forward()


def test_policies_in_torchs_form_send_there() -> None:
    """``MUST_CPU_OFFLOAD`` sends to the region's own place."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> fxckpt.CheckpointPolicy:
        if op is torch.ops.aten.gelu.default:
            return fxckpt.CheckpointPolicy.MUST_CPU_OFFLOAD
        return fxckpt.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(fxckpt.create_selective_checkpoint_contexts, policy)
    host = Adversary(late=True, owned=False)
    sending = Steps(offload=host, context_fn=contexts)
    assert same(sending.gradients(), Steps().gradients(plainly))
    assert host.peak_bytes == (BLOCKS - 1) * INPUT + BLOCKS * 4 * INPUT


def shared_by_regions(host: Host | None, *, is_cloned: bool = False) -> tuple[list[Tensor], int]:
    """Return the gradients of regions that all read one tensor, and the bytes that are away."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
    memory, h = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    scale = memory(h).tanh()
    options = {} if host is None else {"offload": host}
    for i, block in enumerate(blocks):
        if is_cloned and i == 2:
            scale = scale.clone()
        h = fxckpt.checkpoint(lambda h, s, block=block: block(h) * s, h, scale, **options)
    used = 0 if host is None else host.used_bytes
    h.square().mean().backward()
    parameters = (*blocks.parameters(), *memory.parameters())
    return [p.grad for p in parameters if p.grad is not None], used


@pytest.mark.parametrize("is_cloned", [False, True])
def test_what_regions_share_is_sent_once(is_cloned: bool) -> None:
    host = Adversary(late=True, owned=False)
    found, used = shared_by_regions(host, is_cloned=is_cloned)
    assert same(found, shared_by_regions(None, is_cloned=is_cloned)[0])
    assert used == (BLOCKS + is_cloned) * INPUT
    assert left_in(host) == 0


def test_value_written_between_regions_is_sent_anew() -> None:
    """Each region that reads a tensor sends what it was then."""
    host, scale = Host("1GiB"), torch.rand(ROWS, WIDTH)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    for _ in range(2):
        # The backward of the first region comes before the write.
        fxckpt.checkpoint(lambda x, s: (x * s).sin() * s, x, scale, offload=host).sum().backward()
        wanted = x.grad
        x.grad = None
        ((x * scale).sin() * scale).sum().backward()
        assert torch.equal(wanted, x.grad)
        x.grad = None
        scale += 1.0
    assert left_in(host) == 0
