"""The module that runs at the moment, by its name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class RunningModule:
    """The innermost module that runs, while it is watched.

    Parameters
    ----------
    names
        Names of the modules, by their id.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Tanh())
    >>> running = RunningModule({id(model): "model"})
    >>> _ = model.register_forward_pre_hook(lambda *_: print(running.name))
    >>> with running.watched():
    ...     _ = model(torch.ones(1))
    model
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._running: list[str] = []

    @property
    def name(self) -> str:
        """Name of the module; empty outside of all."""
        return self._running[-1] if self._running else ""

    @property
    def is_any(self) -> bool:
        """Whether a module runs at all."""
        return bool(self._running)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow the modules that run inside."""
        # Dynamo would compile the hooks of a compiled model, too.
        enter, leave = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
        before = register_module_forward_pre_hook(enter)
        after = register_module_forward_hook(leave, always_call=True)
        try:
            with warnings.catch_warnings():
                # These hooks may fire an extra time.
                warnings.filterwarnings("ignore", message=r".*when there are global hooks on")
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names.get(id(module), self.name))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()
