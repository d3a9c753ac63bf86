"""``fxckpt.X`` in place of ``torch.utils.checkpoint.X``: names, options, errors, segments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch import Tensor, nn

import fxckpt
from fxckpt import create_selective_checkpoint_contexts as selective
from tests.eager.drop_in.products import aten, two_products


@pytest.mark.parametrize("name", torchs.__all__)
def test_every_name_of_torchs_module_is_here(name: str) -> None:
    from fxckpt import checkpoint as _  # noqa: F401  the function, not the module

    assert callable(getattr(fxckpt, name)) or name == "SAC_IGNORED_OPS"
    ours = __import__("sys").modules["fxckpt.checkpoint"]
    assert getattr(ours, name) is getattr(fxckpt, name)


def test_every_option_of_torchs_checkpoint_is_taken() -> None:
    x = torch.randn(4, requires_grad=True)
    options = {
        "use_reentrant": True,
        "preserve_rng_state": True,
        "determinism_check": "none",
        "debug": True,
        "early_stop": False,
        "respect_saved_tensors_hooks": True,
    }
    assert torch.equal(
        fxckpt.checkpoint(torch.sin, x, context_fn=torchs.noop_context_fn, **options), x.sin()
    )


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda x: fxckpt.checkpoint(3, x), "int is neither"),
        (
            lambda x: fxckpt.checkpoint(torch.sin, x, determinism_check="strict"),
            "'default', 'none'",
        ),
        (lambda x: fxckpt.checkpoint(torch.sin, x, engine="tape"), "'replay', 'rerun'"),
        (lambda x: fxckpt.checkpoint(lambda x: x.sin(), x, budegt=0.5), "did you mean budget"),
        (lambda x: fxckpt.checkpoint(None, x), "give a function"),
        (lambda x: fxckpt.checkpoint(budegt=0.5), "does not know budegt"),
        (lambda x: fxckpt.checkpoint(budget=0.5)(3), "int is neither"),
        (lambda x: fxckpt.checkpoint(torch.sin, x, budget=-1), "budget"),
        (lambda x: fxckpt.checkpoint(torch.sin, x, budget=0.5, engine="rerun"), "engine='replay'"),
        (lambda x: fxckpt.checkpoint(torch.sin, x, policy=3), "not a policy"),
        (
            lambda x: fxckpt.checkpoint(torch.sin, x, policy=lambda *a, **k: "save"),
            "returned 'save'",
        ),
        (
            lambda x: fxckpt.checkpoint(
                torch.sin, x, context_fn=lambda: selective(lambda *a, **k: 7)
            ),
            "returned 7",
        ),
        (
            lambda x: fxckpt.checkpoint(
                torch.sin, x, context_fn=lambda: selective([aten.mm.default]), budget=0.5
            ),
            "both say",
        ),
        (lambda x: fxckpt.checkpoint_sequential([torch.sin], 2, x), "from 1 to 1"),
        (lambda x: fxckpt.checkpoint_sequential([torch.sin], True, x), "from 1 to 1"),
        (lambda x: fxckpt.checkpoint_sequential([], 1, x), "not empty"),
        (lambda x: fxckpt.checkpoint_sequential([torch.sin], 1, x, budegt=1), "budegt"),
        (
            lambda x: fxckpt.checkpoint_sequential([torch.sin] * 4, 2, x, budget=0.5),
            "segments='auto'",
        ),
    ],
)
def test_senseless_calls_are_refused_with_an_explanation(
    call: Callable[[Tensor], Any], told: str
) -> None:
    """A call that makes no sense raises a ValueError that explains the mistake."""
    with pytest.raises(ValueError, match=told):
        call(torch.randn(4, requires_grad=True))


def test_an_error_of_the_function_is_its_own() -> None:
    def region(x: Tensor) -> Tensor:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        fxckpt.checkpoint(region, torch.randn(4))


def test_an_unbound_variable_raises_its_own_error() -> None:
    """An UnboundLocalError in the function reaches the caller as it is."""

    def region(x: Tensor) -> Tensor:
        if x.numel() < 0:
            late = x
        return late

    with pytest.raises(UnboundLocalError):
        fxckpt.checkpoint(region, torch.randn(4))


def test_a_functions_own_keywords_reach_it() -> None:
    assert fxckpt.checkpoint(lambda x, *, cost: cost, torch.zeros(1), cost=3.0) == 3.0


def test_without_a_function_it_is_a_decorator() -> None:
    """``checkpoint(**options)`` decorates a function, every call of which is a region."""

    @fxckpt.checkpoint(use_reentrant=False, policy=[aten.mm.default])
    def region(x: Tensor, w: Tensor, *, scale: float = 1.0) -> Tensor:
        """Multiply twice."""
        return two_products(x, w) * scale

    assert region.__name__ == "region" and region.__doc__ == "Multiply twice."
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with fxckpt.record_regions() as regions:
        torch.manual_seed(0)
        region(x, w, scale=2.0).sum().backward()
    assert len(regions) == 1 and x.grad is not None
    found, x.grad = x.grad, None
    torch.manual_seed(0)
    (two_products(x, w) * 2.0).sum().backward()
    assert torch.equal(found, x.grad)


class SavesInput(torch.autograd.Function):
    """Function that shows the input that its backward gets."""

    seen: tuple[Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(x, mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        SavesInput.seen = ctx.saved_tensors
        return gradient * ctx.saved_tensors[1], None


@pytest.mark.parametrize("depth", [1, 2])
def test_saved_input_comes_back_as_the_same_object(depth: int) -> None:
    """An input without a gradient that an autograd.Function saves is that object again."""
    x, mask = torch.randn(4, requires_grad=True), torch.ones(4)
    function: Callable[..., Tensor] = SavesInput.apply
    for _ in range(depth):
        function = functools.partial(fxckpt.checkpoint, function)
    function(x, mask).sum().backward()
    assert SavesInput.seen[1] is mask


def test_saved_input_with_new_data_keeps_the_old() -> None:
    """An input that was given other data since comes back with the data it had."""
    x, mask = torch.randn(4, requires_grad=True), torch.ones(4)
    out = fxckpt.checkpoint(SavesInput.apply, x, mask)
    mask.data = torch.zeros(4)
    out.sum().backward()
    assert torch.equal(SavesInput.seen[1], torch.ones(4))


# --- segments ---


@pytest.mark.parametrize("segments, regions", [(1, 0), (3, 2), (9, 8), ("auto", 2)])
def test_all_segments_but_the_last_are_regions(segments: int | str, regions: int) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(9)))
    x = torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad(layers(x).sum(), x)[0]
    with fxckpt.record_regions() as found:
        out = fxckpt.checkpoint_sequential(layers, segments, x)
    assert len(found) == regions
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_a_budget_plans_the_whole_sequence() -> None:
    layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)]
    x = torch.randn(64, 16, requires_grad=True)
    with fxckpt.record_regions() as found:
        fxckpt.checkpoint_sequential(layers, "auto", x, budget=0.5).sum().backward()
    (region,) = found
    assert region.plan is not None and region.plan.peak_bytes <= region.plan.budget_bytes  # type: ignore
