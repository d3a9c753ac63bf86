"""``transformers``' Trainer, and the trainers built on it (TRL's SFT, DPO, GRPO): a callback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import nn
from tqdm import tqdm
from transformers import TrainerCallback

from fxckpt import budgets
from fxckpt.backend import Backend
from fxckpt.backend.options import given_by_name
from fxckpt.blocks import compile_each
from fxckpt.errors import InvalidOption
from fxckpt.integrations.transformers import Unpatched, blocks_of, patch_transformers, turn_off
from fxckpt.reports.compile_report import Report
from fxckpt.torch_private import compiled_parts

OF_THE_STEP = ("budget", "policy", "max_slowdown")
"""Options that ask for a plan of the step; without one, every block is run again."""
TORCHS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")
"""Options of torch's checkpoint, which plans of a step do not have."""
_COMPILED: WeakSet[nn.Module] = WeakSet()
"""Blocks that callbacks compiled. A trainer tells no callback of a training that an error ended."""
_PATCHED: WeakKeyDictionary[nn.Module, tuple[Unpatched, dict[str, Any]]] = WeakKeyDictionary()
"""Models whose checkpointing callbacks replaced: as they were, and options of their own."""
_TRAINED: WeakKeyDictionary[nn.Module, tuple[ref[Any], ref[Any]]] = WeakKeyDictionary()
"""The latest callback of each model, and the state of its training."""


class FxckptCallback(TrainerCallback):
    """Trains a trainer's model within a budget of the step, from the first step on.

    With ``budget``, a ``policy`` or ``max_slowdown``, the blocks of the model are compiled one by
    one, as by :func:`fxckpt.compile_blocks`, and those whose values fit are not run again. A
    budget is that of the whole step, over all blocks and what is held outside of them. ``options``
    are those of :class:`fxckpt.Backend`, and Inductor's own; ``inner`` is ``"aot_eager"`` unless
    given, which has eager mode's kernels and random draws, so that losses do not change. What runs
    without gradients, such as evaluation and generation, is not compiled. The model's own
    checkpointing is turned off. At the end of the training one line tells the peak, and
    :meth:`report` has the rest. After an error the model stays changed until :meth:`release`, or
    until it trains again, with a callback of any options.

    ``budget="min"``, ``max_slowdown`` and a policy without a budget are goals of each block by
    itself: the step is not measured, and :meth:`report` has the plans alone.

    Without any of the three, every block is run again in the backward, as by torch's checkpoint,
    and nothing is compiled; ``options`` are those of :func:`fxckpt.checkpoint`, for each block.

    ``gradient_checkpointing`` need not be on; its ``gradient_checkpointing_kwargs`` may hold
    options too, and ``options`` override them:
    ``TrainingArguments(gradient_checkpointing_kwargs={"budget": "20GiB"})``.

    Raises :class:`fxckpt.InvalidOption` and :class:`fxckpt.InvalidBudget` for invalid options, and
    when the training begins, for a model in which no blocks are found, and for one that is compiled
    already, as by ``torch_compile=True``.

    >>> FxckptCallback(budget="60%")
    FxckptCallback(budget='60%')
    """

    def __init__(self, budget: budgets.Budget = None, **options: Any) -> None:
        given = {} if budget is None else {"budget": budget}
        self.options: dict[str, Any] = {**given, **options}
        self.backend: Backend | None = None
        """The backend that compiles the blocks; None where every block is run again."""
        self._given: dict[str, Any] = {}
        """Options that the backend was made with."""
        if _is_of_step(self.options):
            self._make_backend(self.options).is_waiting = True

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"FxckptCallback({given})"

    def report(self) -> Report:
        """Return the report of the training, which prints as text; its ``step`` is a table.

        Raises :class:`fxckpt.InvalidOption` where nothing was planned: before a training, and where
        every block is run again.
        """
        if self.backend is not None and self.backend.is_waiting:
            raise InvalidOption(f"{self!r} has no report yet: no training has begun with it.")
        if self.backend is None:
            raise InvalidOption(
                f"{self!r} has no report: without a budget, a policy or max_slowdown every block "
                "is run again, and nothing is planned. Give a budget, such as '60%'; "
                "fxckpt.record_regions() tells of regions."
            )
        return self.backend.report()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Compile or patch the model; called by the trainer."""
        self._take(model, state)
        _release(model)
        given = dict(
            getattr(args, "activation_checkpointing_kwargs", None)
            or getattr(args, "gradient_checkpointing_kwargs", None)
            or {}
        )
        every_n_layers = given.pop("every_n_layers", 1)
        offload = given.pop("offload", False)
        if offload and "offload" not in self.options:
            if offload is True:
                raise InvalidOption(
                    "offload=True says not how much may be away. Give a limit in bytes: "
                    "gradient_checkpointing_kwargs={'budget': '20GiB', 'offload': '64GiB'}, "
                    "or FxckptCallback(..., offload='64GiB')."
                )
            given["offload"] = offload
        torchs = {name: value for name, value in given.items() if name in TORCHS}
        if _is_of_step(given | self.options):
            if every_n_layers != 1:
                raise InvalidOption(
                    f"every_n_layers={every_n_layers!r}: a budget decides what is run again. Leave "
                    "out one of the two."
                )
            if getattr(args, "torch_compile", False):
                raise InvalidOption(
                    f"{self!r} compiles the blocks of the model, and torch_compile=True the model. "
                    "Leave out torch_compile, or the callback: torch_compile_backend='fxckpt' "
                    "takes a budget from FXCKPT_BUDGET."
                )
            given = {name: value for name, value in given.items() if name not in TORCHS}
            self._compile(model, given | self.options, torchs)
            return
        _PATCHED[model] = Unpatched.of(model), torchs
        patch_transformers(model, **(given | self.options))
        if every_n_layers != 1:
            model.activation_checkpointing_enable(
                given | self.options, every_n_layers=every_n_layers
            )

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Tell the peak, and run the blocks uncompiled again; called by the trainer."""
        if self.release(model) and self.backend is not None and state.is_world_process_zero:
            report = self.backend.report()
            if report.step is not None:
                tqdm.write(f"fxckpt: {report.step.summary()}")
            elif self.backend.step is None and report.plans:
                tqdm.write(
                    f"fxckpt: {len(report.plans)} plan(s) of blocks, whose figures report() has; "
                    "the step is measured where its budget is in bytes, or a share such as '60%'"
                )

    def release(self, model: nn.Module) -> bool:
        """Leave a model as it was, and return whether some of its blocks were compiled.

        The end of a training does so; after an error or Ctrl-C it is up to you.
        """
        if self.backend is not None and self.backend.step is not None:
            self.backend.step.leave_model()
        return bool(_release(model))

    def _take(self, model: nn.Module, state: Any) -> None:
        """Take a model for one training; raise if another callback of the same one has it."""
        of, taken = _TRAINED.get(model, (None, None))
        other = None if taken is None else taken()
        if of is not None and of() is state and other is not None and other is not self:
            raise InvalidOption(
                f"{other!r} and {self!r} are callbacks of one trainer. Leave out one of them: "
                "trainer.remove_callback(...)."
            )
        _TRAINED[model] = ref(state), ref(self)

    def _compile(self, model: nn.Module, given: Mapping[str, Any], torchs: dict[str, Any]) -> None:
        """Compile the blocks of a model, whose own checkpointing is turned off."""
        blocks = blocks_of(model)
        if not blocks:
            raise InvalidOption(
                f"no repeated blocks were found in {type(model).__name__}. Compile the parts that "
                "you know before the trainer is made, without the callback: "
                "fxckpt.compile_blocks([model.encoder, model.decoder], budget='2GiB')."
            )
        if compiled := compiled_parts(model):
            name = next(iter(compiled))
            raise InvalidOption(
                f"{self!r} compiles the blocks of the model, but {name or type(model).__name__} is "
                "compiled already. Give the trainer the model without torch.compile and "
                "module.compile(), or leave out the callback."
            )
        _PATCHED[model] = Unpatched.of(model), torchs
        turn_off(model)
        backend = self._make_backend(given)
        backend.is_waiting = False
        _COMPILED.update(blocks)
        compile_each(blocks, backend, only_with_gradients=True)

    def _make_backend(self, given: Mapping[str, Any]) -> Backend:
        """Return the backend for some options; the same options have the same, and its code."""
        if self.backend is None or self._given != given:
            self.backend = Backend(**given_by_name({"inner": "aot_eager", **given}, None, {}))
            self._given = dict(given)
        return self.backend


def _release(model: nn.Module) -> list[nn.Module]:
    """Leave a model as it was before a callback; return the blocks that it had compiled."""
    if (patched := _PATCHED.pop(model, None)) is not None:
        before, options = patched
        before.restore(model, options)
    blocks = [module for module in model.modules() if module in _COMPILED]
    for block in blocks:
        block._compiled_call_impl = None
        _COMPILED.discard(block)
    return blocks


def _is_of_step(options: Mapping[str, Any]) -> bool:
    return any(options.get(name) is not None for name in OF_THE_STEP)
