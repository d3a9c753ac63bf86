"""``torch.utils.checkpoint`` replaced by fxckpt, process-wide and undone again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch.utils.checkpoint

from fxckpt.eager import api
from fxckpt.errors import InvalidOption
from fxckpt.torch_private import REPLACED, modules_with


def _twin(function: Any) -> FunctionType:
    """Return a function that does the same and is another object, so that it can be found again."""
    twin = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__annotations__ = function.__annotations__
    twin.__doc__ = function.__doc__
    twin.__module__ = __name__  # where pickle looks it up
    return twin


checkpoint = _twin(api.checkpoint)
checkpoint_sequential = _twin(api.checkpoint_sequential)
create_selective_checkpoint_contexts = _twin(api.create_selective_checkpoint_contexts)

OURS: dict[str, Callable[..., Any]] = {
    "checkpoint": checkpoint,
    "checkpoint_sequential": checkpoint_sequential,
    "create_selective_checkpoint_contexts": create_selective_checkpoint_contexts,
}
"""Replacements, by their name in ``torch.utils.checkpoint``."""
NAME_OF = {id(function): name for names in (REPLACED, OURS) for name, function in names.items()}


class TorchPatch:
    """Handle of :func:`patch_torch`: ``undo()`` gives torch its functions back.

    It is also a context manager that undoes the patch at its end.
    """

    def __init__(self, replaced: list[tuple[ModuleType, str, Any]]) -> None:
        self._replaced = replaced

    @property
    def places(self) -> tuple[str, ...]:
        """The names that were replaced, such as ``"torch.utils.checkpoint.checkpoint"``."""
        return tuple(sorted(f"{module.__name__}.{name}" for module, name, _ in self._replaced))

    def undo(self) -> None:
        """Give torch its functions back, also in modules imported meanwhile; again: do nothing.

        A name that was assigned something else since keeps it.
        """
        global _active
        with _lock:
            if _active is not self:
                return
            before = {(id(module), name): value for module, name, value in self._replaced}
            for module, name, value in modules_with(tuple(OURS.values())):
                torchs = REPLACED[NAME_OF[id(value)]]
                setattr(module, name, before.get((id(module), name), torchs))
            _active = None

    def __enter__(self) -> TorchPatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


_lock = threading.RLock()
_active: TorchPatch | None = None


def patch_torch() -> TorchPatch:
    """Replace the checkpoint functions of ``torch.utils.checkpoint`` by fxckpt's, everywhere.

    ``checkpoint``, ``checkpoint_sequential`` and ``create_selective_checkpoint_contexts`` are
    replaced in torch's module and in every loaded module that imported them by name, such as
    ``torch.distributed.algorithms._checkpoint.checkpoint_wrapper`` and
    ``transformers.modeling_utils``; modules imported later get fxckpt's. Functions held elsewhere
    stay torch's: in a ``functools.partial``, a default argument, a closure, or a module that was
    wrapped by ``checkpoint_wrapper`` before. Inside ``torch.compile`` a region stays torch's own,
    which Dynamo tags.

    Returns
    -------
    TorchPatch
        A handle whose ``undo()`` reverts the patch, also at the end of a ``with`` block.

    Raises
    ------
    InvalidOption
        If the patch is active already: its handle undoes it.

    Examples
    --------
    >>> import torch, fxckpt
    >>> from torch.utils import checkpoint as torchs
    >>> x = torch.randn(4, requires_grad=True)
    >>> with fxckpt.patch_torch(), fxckpt.record_regions() as regions:
    ...     torchs.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    >>> len(regions)
    1
    """
    global _active
    with _lock:
        if _active is not None:
            raise InvalidOption(
                "patch_torch() was called, and torch.utils.checkpoint is patched already. "
                "Undo the first patch before: its handle has undo()."
            )
        found = list(modules_with(tuple(REPLACED.values())))
        own = torch.utils.checkpoint
        for name in OURS:
            # Torch's module comes first and always, also if its names were assigned others.
            value = getattr(own, name)
            if value is not REPLACED[name]:
                found.append((own, name, value))
        patch = TorchPatch(found)
        _active = patch
        try:
            for module, name, value in found:
                ours = OURS[name if module is own else NAME_OF[id(value)]]
                setattr(module, name, ours)
        except BaseException:
            patch.undo()
            raise
        return patch
