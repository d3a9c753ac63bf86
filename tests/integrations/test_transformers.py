"""Models of transformers whose checkpointing is fxckpt's, however it is turned on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fxckpt


def gpt2() -> Any:
    """Return a GPT-2 of two small blocks."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    return transformers.GPT2LMHeadModel(config).train()


def options(model: nn.Module) -> list[dict[str, Any]]:
    """Return the options that each block's function has; it must be fxckpt's."""
    functions = [block._gradient_checkpointing_func for block in model.transformer.h]  # type: ignore[union-attr]
    assert all(function.func is fxckpt.checkpoint for function in functions)
    return [function.keywords for function in functions]


def regions(model: nn.Module) -> int:
    """Return how many regions of fxckpt a step has."""
    with fxckpt.record_regions() as found:
        model(torch.arange(20).view(2, 10)).logits.sum().backward()
    return len(found)


def test_trainers_turn_on_a_patched_model() -> None:
    """Checkpointing turned on later is fxckpt's, with the options given there."""
    model = fxckpt.patch_transformers(gpt2(), budget="1GiB")
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert options(model) == [{"budget": "1GiB", "use_reentrant": False}] * 2
    model.activation_checkpointing_enable({"budget": "2GiB"})
    assert options(model) == [{"budget": "2GiB"}] * 2
    assert regions(model) == 2
    model.activation_checkpointing_disable()
    assert not model.is_gradient_checkpointing and regions(model) == 0


def test_a_copy_has_a_patch_of_its_own() -> None:
    """Turning a copy of a patched model off leaves the model on."""
    model = fxckpt.patch_transformers(gpt2())
    other = copy.deepcopy(model)
    other.activation_checkpointing_disable()
    assert (regions(model), regions(other)) == (2, 0)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: fxckpt.patch_transformers(nn.Linear(2, 2)), "Linear is no transformers model"),
        (lambda: fxckpt.patch_transformers(gpt2(), polcy=1), "Did you mean 'policy'"),
        (lambda: fxckpt.patch_transformers(gpt2(), budget="lots"), "does not parse"),
        (
            lambda: fxckpt.patch_transformers(gpt2()).activation_checkpointing_enable({"bugt": 1}),
            "Did you mean 'budget'",
        ),
        (
            lambda: fxckpt.patch_transformers(gpt2()).activation_checkpointing_enable(offload=True),
            "offload=True",
        ),
    ],
)
def test_what_regions_lack_is_refused(call: Callable[[], Any], told: str) -> None:
    """A wrong option, or one that only torch's checkpoint has, is an error."""
    with pytest.raises(ValueError, match=told):
        call()
