"""The callback of transformers' trainers, as a trainer calls it; recipes run the trainers."""

from __future__ import annotations

import gc
import io
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fxckpt
from fxckpt.integrations.trainer import FxckptCallback
from fxckpt.torch_private import compiled_parts
from tests.integrations.test_transformers import gpt2, options
from tests.tiers.adversary import Adversary


class State:
    """What a trainer knows of one training."""

    is_world_process_zero = True


STATE = State()
TOKENS = torch.arange(40).view(4, 10)


def begun(callback: FxckptCallback, **given: Any) -> Any:
    """Return a model whose training has begun with the callback."""
    model = gpt2()
    model.activation_checkpointing_enable({"use_reentrant": False})
    arguments = SimpleNamespace(activation_checkpointing_kwargs=None, **given)
    callback.on_train_begin(arguments, State(), None, model=model)
    return model


def gradients(model: Any) -> list[torch.Tensor | None]:
    """Return the gradients after two steps, which drop the same values in every model."""
    for _ in range(2):
        torch.manual_seed(0)
        model(TOKENS, labels=TOKENS).loss.backward()
    return [p.grad for p in model.parameters()]


def test_the_callback_has_the_last_word() -> None:
    """Options come from the trainer's arguments, and those of the callback override them."""
    given = {"preserve_rng_state": True, "early_stop": True}
    model = begun(FxckptCallback(early_stop=False), gradient_checkpointing_kwargs=given)
    assert all(not o["early_stop"] and o["preserve_rng_state"] for o in options(model))


def test_every_second_block() -> None:
    """every_n_layers, which the trainer itself takes out, holds for fxckpt's regions too."""
    model = begun(FxckptCallback(), gradient_checkpointing_kwargs={"every_n_layers": 2})
    assert [block.gradient_checkpointing for block in model.transformer.h] == [True, False]
    assert all(function == {} or "every_n_layers" not in function for function in options(model))
    assert fxckpt.checkpoint is model.transformer.h[0]._gradient_checkpointing_func.func


def test_a_budget_is_that_of_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks are compiled, one line tells the peak, and gradients are those of eager mode."""
    callback = FxckptCallback("70%")
    model = begun(callback, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert list(compiled_parts(model)) == ["transformer.h.0", "transformer.h.1"]
    assert not model.is_gradient_checkpointing
    found = gradients(model)
    step = callback.report().step
    assert step is not None and step.measured_peak_bytes <= step.budget_bytes
    assert sum(row.calls for row in step.rows) == 2 and {row.graph for row in step.rows} == {1}
    callback.on_train_end(None, STATE, None, model=model)
    assert compiled_parts(model) == {}
    assert capsys.readouterr().out.startswith("fxckpt: the step's peak is ")
    torch.testing.assert_close(found, gradients(gpt2()), rtol=0, atol=0)


def test_evaluation_is_not_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    """A forward without gradients makes no graph; a policy alone measures no step."""
    callback = FxckptCallback(policy="save_matmuls")
    model = begun(callback, gradient_checkpointing_kwargs={})
    with torch.no_grad():
        model(TOKENS)
    assert "no graph" in str(callback.report())
    model(TOKENS).logits.sum().backward()
    assert callback.report().plans
    callback.on_train_end(None, STATE, None, model=model)
    assert capsys.readouterr().out.startswith("fxckpt: 1 plan(s) of blocks")


@pytest.mark.parametrize("is_callbacks", [True, False])
def test_regions_send_their_inputs_away(is_callbacks: bool) -> None:
    """Without a budget, blocks are run again from inputs that were away."""
    host = fxckpt.tiers.Host("1GiB", 1e10)
    callback = FxckptCallback(**({"offload": host} if is_callbacks else {}))
    kwargs = {} if is_callbacks else {"offload": host}
    model = begun(callback, gradient_checkpointing_kwargs=kwargs)
    torch.testing.assert_close(gradients(model), gradients(gpt2()), rtol=0, atol=0)
    assert host.peak_bytes > 0 and host.used_bytes == 0


def test_training_again_compiles_nothing_new() -> None:
    """A second training with the same options has the same backend."""
    callback = FxckptCallback()
    model = begun(callback, gradient_checkpointing_kwargs={"budget": "1GiB"})
    backend = callback.backend
    assert backend is not None
    gradients(model)
    made = backend.plans
    callback.on_train_end(None, STATE, None, model=model)
    arguments = SimpleNamespace(gradient_checkpointing_kwargs={"budget": "1GiB"})
    callback.on_train_begin(arguments, State(), None, model=model)
    gradients(model)
    assert callback.backend is backend and backend.plans == made


def test_blocks_send_values_away() -> None:
    """A training within a budget sends and fetches, with the gradients of eager mode."""
    host = Adversary(late=True)
    callback = FxckptCallback("70%", inner="aot_eager", offload=host)
    model = begun(callback, gradient_checkpointing_kwargs={})
    found = gradients(model)
    step = callback.report().step
    assert step is not None and step.measured_peak_bytes <= step.budget_bytes
    assert host.sent == host.fetched > 0 and host.used_bytes == 0
    callback.on_train_end(None, STATE, None, model=model)
    torch.testing.assert_close(found, gradients(gpt2()), rtol=0, atol=0)


def test_what_is_sent_away_has_a_limit() -> None:
    """A place among the trainer's arguments is the backend's, but for the callback's own."""
    kwargs = {"offload": "1GiB"}
    for callback in (FxckptCallback("80%"), FxckptCallback("80%", offload="2GiB")):
        model = begun(callback, gradient_checkpointing_kwargs=dict(kwargs))
        gradients(model)
        assert callback._given["offload"] == callback.options.get("offload", "1GiB")


def test_ended_training_leaves_no_hook() -> None:
    """The model is as it was, hooks too, after a training and after one that was given up."""
    callback = FxckptCallback("70%")
    model = begun(callback)
    gradients(model)
    assert any(module._forward_pre_hooks for module in model.modules())
    callback.on_train_end(None, STATE, None, model=model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    callback.on_train_begin(SimpleNamespace(), State(), None, model=model)
    gradients(model)
    assert callback.release(model) and compiled_parts(model) == {}
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not callback.release(model)


def test_waiting_callback_counts_no_steps() -> None:
    """A callback that no training has begun with says nothing of other models."""
    callback = FxckptCallback("70%")
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters())
    for _ in range(5):
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with pytest.raises(fxckpt.InvalidOption, match="no training has begun with it"):
        callback.report()


def test_an_error_ends_a_training() -> None:
    """The next callback takes the blocks over, whatever options it has."""
    model = begun(FxckptCallback("70%"))
    patching = FxckptCallback()
    patching.on_train_begin(SimpleNamespace(), State(), None, model=model)
    assert compiled_parts(model) == {} and model.is_gradient_checkpointing
    planning = FxckptCallback("80%")
    planning.on_train_begin(SimpleNamespace(), State(), None, model=model)
    gradients(model)
    assert planning.report().step is not None
    planning.on_train_end(None, STATE, None, model=model)
    assert compiled_parts(model) == {}


@pytest.mark.parametrize("budget", [None, "70%"])
@pytest.mark.parametrize("is_on", [True, False])
def test_ended_training_restores_checkpointing(budget: str | None, is_on: bool) -> None:
    """The model's own checkpointing is as it was, with its own function and options."""
    model = gpt2()
    if is_on:
        model.activation_checkpointing_enable({"use_reentrant": False})
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = len(model.get_input_embeddings()._forward_hooks)
    callback = FxckptCallback(budget)
    given = SimpleNamespace(gradient_checkpointing_kwargs={"use_reentrant": False})
    callback.on_train_begin(given, State(), None, model=model)
    gradients(model)
    callback.on_train_end(None, STATE, None, model=model)
    assert model.is_activation_checkpointing == is_on
    assert len(model.get_input_embeddings()._forward_hooks) == hooks
    after = {name: set(vars(module)) for name, module in model.named_modules()}
    added = set().union(*(after[name] - before[name] for name in before))
    assert added <= {"gradient_checkpointing", "_require_grads_hooks", "_compiled_call_impl"}
    if is_on:
        function = model.transformer.h[0]._gradient_checkpointing_func
        assert function.func is torch.utils.checkpoint.checkpoint
        assert function.keywords == {"use_reentrant": False}
    else:
        torch.save(model, io.BytesIO())


@pytest.mark.parametrize("budget", [None, "70%"])
def test_failed_training_does_not_keep_its_model(budget: str | None) -> None:
    """A model that a callback changed, patched before or not, is freed without a release."""
    for is_patched in (False, True):
        model = fxckpt.patch_transformers(gpt2()) if is_patched else gpt2()
        FxckptCallback(budget).on_train_begin(SimpleNamespace(), State(), None, model=model)
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None


def test_users_patch_stays_after_a_training() -> None:
    """A model that was patched before a training is patched after it, by methods of its own."""
    model = fxckpt.patch_transformers(gpt2())
    before = vars(model)["_set_gradient_checkpointing"]
    callback = FxckptCallback("70%")
    callback.on_train_begin(SimpleNamespace(), State(), None, model=model)
    callback.release(model)
    assert vars(model)["_set_gradient_checkpointing"] == before
    assert model.transformer.h[0]._gradient_checkpointing_func.func is fxckpt.checkpoint


def test_two_callbacks_of_one_trainer() -> None:
    """The second one is refused by name."""
    model, state = gpt2(), State()
    FxckptCallback("70%").on_train_begin(SimpleNamespace(), State(), None, model=model)
    first, second = FxckptCallback("60%"), FxckptCallback("50%")
    first.on_train_begin(SimpleNamespace(), state, None, model=model)
    with pytest.raises(fxckpt.InvalidOption, match=r"'60%'.*'50%'.*one trainer"):
        second.on_train_begin(SimpleNamespace(), state, None, model=model)
    first.release(model)


@pytest.mark.parametrize("part", ["transformer.h.1", ""])
def test_a_compiled_model_is_refused(part: str) -> None:
    """Blocks inside of what is compiled already would be planned twice."""
    model = gpt2()
    model.get_submodule(part).compile(backend="eager")
    with pytest.raises(fxckpt.InvalidOption, match=f"{part or 'GPT2LMHeadModel'} is compiled"):
        FxckptCallback("50%").on_train_begin(SimpleNamespace(), State(), None, model=model)
    assert list(compiled_parts(model)) == [part]


@pytest.mark.parametrize(
    ("given", "arguments", "told"),
    [
        ({"budget": "60%"}, {"torch_compile": True}, "Leave out torch_compile"),
        ({"budget": "60%"}, {"kwargs": {"every_n_layers": 2}}, "a budget decides"),
        ({"budget": "60%"}, {"kwargs": {"offload": True}}, "Give a limit in bytes"),
        ({}, {"kwargs": {"offload": True}}, "Give a limit in bytes"),
        ({"budgte": "60%"}, {}, "Did you mean 'budget'"),
    ],
)
def test_what_does_not_go_together(given: Any, arguments: Any, told: str) -> None:
    """Options that exclude each other, and unknown ones, are refused before a step."""
    kwargs = arguments.pop("kwargs", None)
    with pytest.raises(fxckpt.InvalidOption, match=told):
        begun(FxckptCallback(**given), gradient_checkpointing_kwargs=kwargs, **arguments)


def test_options_are_refused_at_once() -> None:
    """A bad budget is an error of the callback's line; without a plan there is no report."""
    with pytest.raises(fxckpt.InvalidBudget, match="150%"):
        FxckptCallback("150%")
    with pytest.raises(fxckpt.InvalidOption, match="innr"):
        FxckptCallback("50%", innr="inductor")
    with pytest.raises(fxckpt.InvalidOption, match="has no report"):
        FxckptCallback().report()
    with pytest.raises(fxckpt.InvalidOption, match="no repeated blocks"):
        model, arguments = torch.nn.Linear(2, 2), SimpleNamespace()
        FxckptCallback("50%").on_train_begin(arguments, State(), None, model=model)
