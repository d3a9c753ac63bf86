"""``transformers``' Trainer, and the trainers built on it (TRL's SFT, DPO, GRPO): a callback."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from fxckpt.integrations.transformers import patch_transformers


class FxckptCallback(TrainerCallback):
    """Checkpoints the blocks of a trainer's model by fxckpt, from the first step on.

    ``options`` are those of :func:`fxckpt.checkpoint`, for each block. ``gradient_checkpointing``
    need not be on; its ``gradient_checkpointing_kwargs`` may hold options too, and ``options``
    override them:
    ``TrainingArguments(gradient_checkpointing_kwargs={"budget": "1GiB"})``.

    Raises :class:`fxckpt.InvalidOption` when the training begins, for unknown options, ``offload``,
    and models without gradient checkpointing.

    >>> FxckptCallback(budget=0.5)
    FxckptCallback(budget=0.5)
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"FxckptCallback({given})"

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Patch the model; called by the trainer."""
        given = dict(
            getattr(args, "activation_checkpointing_kwargs", None)
            or getattr(args, "gradient_checkpointing_kwargs", None)
            or {}
        )
        every_n_layers = given.pop("every_n_layers", 1)
        offload = given.pop("offload", False)
        patch_transformers(model, **(given | self.options))
        if every_n_layers != 1 or offload:
            model.activation_checkpointing_enable(
                given | self.options, every_n_layers=every_n_layers, offload=offload
            )
