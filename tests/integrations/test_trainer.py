"""The callback of transformers' trainers, as a trainer calls it; recipes run the trainers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fxckpt
from fxckpt.integrations.trainer import FxckptCallback
from tests.integrations.test_transformers import gpt2, options


def begun(callback: FxckptCallback, **given: Any) -> Any:
    """Return a model whose training has begun with the callback."""
    model = gpt2()
    model.activation_checkpointing_enable({"use_reentrant": False})
    arguments = SimpleNamespace(activation_checkpointing_kwargs=None, **given)
    callback.on_train_begin(arguments, None, None, model=model)
    return model


def test_the_callback_has_the_last_word() -> None:
    """Options come from the trainer's arguments, and those of the callback override them."""
    given = {"budget": "1GiB", "preserve_rng_state": True}
    model = begun(FxckptCallback(budget="2GiB"), gradient_checkpointing_kwargs=given)
    assert all(o["budget"] == "2GiB" and o["preserve_rng_state"] for o in options(model))


def test_every_second_block() -> None:
    """every_n_layers, which the trainer itself takes out, holds for fxckpt's regions too."""
    model = begun(FxckptCallback(), gradient_checkpointing_kwargs={"every_n_layers": 2})
    assert [block.gradient_checkpointing for block in model.transformer.h] == [True, False]
    assert all(function == {} or "every_n_layers" not in function for function in options(model))
    assert fxckpt.checkpoint is model.transformer.h[0]._gradient_checkpointing_func.func
