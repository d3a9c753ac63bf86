"""Hugging Face ``accelerate``: ``"fxckpt"`` as the name of a compiler backend.

``accelerate``, and ``transformers``' Trainer through it, take only the backends of an enumeration.
:func:`register` adds fxckpt to it, for ``TorchDynamoPlugin(backend="fxckpt")``,
``TrainingArguments(torch_compile_backend="fxckpt")`` and ``ACCELERATE_DYNAMO_BACKEND=fxckpt``.
"""

from __future__ import annotations

from typing import Any

NAME = "FXCKPT"


def register() -> None:
    """Add ``"fxckpt"`` to the backends that ``accelerate`` knows; again is harmless.

    Options go to ``TorchDynamoPlugin(options={"budget": "20GiB"})``. The Trainer has none to give:
    there ``FXCKPT_BUDGET`` and ``FXCKPT_POLICY`` in the environment hold.
    """
    from accelerate.utils import DynamoBackend

    if getattr(DynamoBackend, "fxckpt_member", None) is not None:
        return
    member = str.__new__(DynamoBackend, NAME)
    member._name_ = member._value_ = NAME
    refuse = DynamoBackend._missing_

    # What an enumeration calls for a value that is none of its members'.
    def missing(cls: Any, value: object) -> Any:
        return member if value == NAME else refuse(value)

    DynamoBackend._missing_ = classmethod(missing)
    DynamoBackend.fxckpt_member = member
