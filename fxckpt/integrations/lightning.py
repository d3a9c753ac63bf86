"""Lightning: a callback that trains the modules inside a LightningModule within a budget.

A LightningModule itself does not compile: its steps log, and talk to the trainer. The modules that
it calls do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from fxckpt.backend import Backend
from fxckpt.backend.options import given_by_name
from fxckpt.errors import InvalidOption
from fxckpt.reports.compile_report import Report


class FxckptCallback(Callback):  # type: ignore[misc]
    """Compiles modules of a LightningModule by :class:`fxckpt.Backend` when a fit begins.

    ``modules`` are names of submodules (``"model"``, ``"encoder.layers"``), by default every child
    with parameters; of a list of modules each is compiled by itself. ``options`` are those of
    ``torch.compile(backend="fxckpt")``: those of :class:`fxckpt.Backend`, and Inductor's own. A
    budget is that of the step, over all the modules. ``training_step`` and its ``self.log`` run as
    they are, so does validation. At the end of the fit, or after an error, the modules run
    uncompiled again. :attr:`backend` has the plans.

    Raises :class:`fxckpt.InvalidOption` for options that do not exist, and when the fit begins, if
    there is no such module.
    """

    def __init__(self, *modules: str, **options: Any) -> None:
        self.modules = modules
        self.backend = Backend(**given_by_name(options, None, {}))
        """The backend that compiles all the modules."""
        self.backend.is_waiting = True
        self._compiled: list[nn.Module] = []

    def report(self) -> Report:
        """Return the report of the fit, which prints as text; its ``step`` is a table."""
        return self.backend.report()

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Compile the modules; called by Lightning."""
        children = {
            name: child
            for name, child in pl_module.named_children()
            if any(p.requires_grad for p in child.parameters())
        }
        found = dict(pl_module.named_modules())
        wanted = self.modules or tuple(children)
        if not wanted or any(name not in found or not name for name in wanted):
            raise InvalidOption(
                f"FxckptCallback{self.modules!r}: {type(pl_module).__name__} has no such modules. "
                f"Its children with parameters: {', '.join(children) or 'none'}. Keep the model in "
                "one, as self.model = ..., and call it in training_step."
            )
        self._compiled = [part for name in wanted for part in _with_forward(found[name])]
        self.backend.is_waiting = False
        for module in self._compiled:
            self.backend.modules.compile(module)

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Run the modules uncompiled again; called by Lightning."""
        self._release()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Run the modules uncompiled again; called by Lightning after an error or Ctrl-C."""
        self._release()

    def _release(self) -> None:
        for module in self._compiled:
            module._compiled_call_impl = None
        self._compiled = []
        if self.backend.step is not None:
            self.backend.step.leave_model()


def _with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, or the items of a list or dict of modules, which is never called itself."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children():
            yield from _with_forward(child)
    else:
        yield module
