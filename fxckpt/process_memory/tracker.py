"""Tracker: the storages of a step, the module and kind of each, and those live at the peak.

The tracker is a dispatch mode. It sees the results of ops, in eager code and in graphs that
``aot_eager`` runs, and not the memory that kernels and Inductor's code allocate for themselves.
"""

from __future__ import annotations

import linecache
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt.step.out_of_memory import is_out_of_memory
from fxckpt.torch_private import in_backward
from fxckpt.utils.running_module import RunningModule

MemoryKind = Literal[
    "parameters",
    "buffers",
    "optimizer state",
    "gradients",
    "activations in graphs",
    "activations outside graphs",
    "temporaries of the backward",
    "temporaries of the optimizer",
]
"""Purpose of a storage."""
GENERATED = "<eval_with_key>"
"""How the file of a graph's generated code begins."""
ASSIGNED = re.compile(r"\s*(\w+)\b[^=]*=")
"""The name that a line of generated code assigns: that of its node."""
FRAMES = 4
"""How many callers of an op are looked at for generated code."""


@dataclass(eq=False)
class TrackedStorage:
    """One storage; its kind may become known after it was made."""

    bytes: int
    kind: MemoryKind
    module: str
    """Path of the module that made it, or whose parameter it belongs to."""


@dataclass(frozen=True)
class Failure:
    """An op that ran out of memory."""

    op: str
    module: str
    """Path of the module that ran; empty outside of all."""
    is_backward: bool
    is_in_graph: bool
    """Whether the code of a compiled graph called the op."""
    storages: tuple[TrackedStorage, ...]
    """Storages that were live."""
    allocated_bytes: int
    """Bytes in use when it failed."""


class MemoryTracker(TorchDispatchMode):
    """Follow the storages of one device while active.

    Parameters
    ----------
    model
        The modules whose names are used.
    device
        The device.
    allocated
        Returns the bytes in use on the device.
    modules
        Modules of the nodes of compiled graphs, by the nodes' names.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        allocated: Callable[[], int],
        modules: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.device, self.allocated, self.modules = device, allocated, modules
        self.failure: Failure | None = None
        self.peak: tuple[TrackedStorage, ...] = ()
        self._most = self._total = 0
        self._live: dict[int, TrackedStorage] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._running = RunningModule({id(m): name for name, m in model.named_modules()})
        self._optimizing = 0
        self._parameters = dict(model.named_parameters())
        for name, parameter in self._parameters.items():
            self.adopt(parameter, "parameters", _owner(name))
            if parameter.grad is not None:
                self.adopt(parameter.grad, "gradients", _owner(name))
        for name, buffer in model.named_buffers():
            self.adopt(buffer, "buffers", _owner(name))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo run compiled code under this mode."""
        return True

    @property
    def total_bytes(self) -> int:
        """Bytes of the storages that are followed and live."""
        return self._total

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Follow the storages that are made inside."""
        with ExitStack() as stack:
            handles = [
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
            ]
            for name, parameter in self._parameters.items():
                if parameter.requires_grad:
                    hook = self._note_gradient(_owner(name))
                    handles.append(parameter.register_post_accumulate_grad_hook(hook))
            for handle in handles:
                stack.callback(handle.remove)
            stack.enter_context(self._running.watched())
            stack.enter_context(self)
            yield

    def adopt(self, tensor: Tensor, kind: MemoryKind, module: str) -> None:
        """Follow a tensor's storage, or tell the kind of one that is followed."""
        for part in _storages([tensor], self.device):
            tracked = self._live.get(part._cdata)
            if tracked is None:
                self._follow(part, TrackedStorage(part.nbytes(), kind, module))
            else:
                tracked.kind, tracked.module = kind, module

    def adopt_state(self, optimizer: Optimizer) -> None:
        """Follow the state of an optimizer."""
        names = {id(p): _owner(name) for name, p in self._parameters.items()}
        for parameter, state in optimizer.state.items():
            for value in pytree.tree_leaves(state):
                if isinstance(value, Tensor):
                    self.adopt(value, "optimizer state", names.get(id(parameter), ""))

    def _follow(self, storage: Any, tracked: TrackedStorage) -> None:
        key = storage._cdata

        def forget(_: Any) -> None:
            self._total -= tracked.bytes
            self._live.pop(key, None)
            self._references.pop(key, None)

        self._live[key] = tracked
        self._references[key] = weakref.ref(storage, forget)
        self._total += tracked.bytes

    def _before_optimizer(self, *_: Any) -> None:
        self._optimizing += 1

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self._optimizing -= 1
        self.adopt_state(optimizer)

    def _note_gradient(self, module: str) -> Any:
        def note(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.adopt(parameter.grad, "gradients", module)

        return note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        node = _running_node(sys._getframe(1))
        is_in_graph = node is not None
        module = self._module(node)
        try:
            result = func(*args, **(kwargs or {}))
        except Exception as error:
            if is_out_of_memory(error):
                self.failure = self._failed(func, module, is_in_graph)
            raise
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        for storage in _storages(made, self.device):
            if storage._cdata not in self._live and not _is_given(storage, args, kwargs):
                self._follow(
                    storage, TrackedStorage(storage.nbytes(), self._kind(is_in_graph), module)
                )
        if self._total > self._most:
            self._most, self.peak = self._total, tuple(self._live.values())
        return result

    def _kind(self, is_in_graph: bool) -> MemoryKind:
        if self._optimizing:
            return "temporaries of the optimizer"
        if in_backward() and not torch.is_grad_enabled():
            return "temporaries of the backward"
        return "activations in graphs" if is_in_graph else "activations outside graphs"

    def _module(self, node: str | None) -> str:
        running = self._running.name
        return running if node is None else self.modules.get(node, running)

    def _failed(self, func: Any, module: str, is_in_graph: bool) -> Failure:
        return Failure(
            f"{func.namespace}.{func._opname}",
            module,
            in_backward(),
            is_in_graph,
            tuple(self._live.values()),
            self.allocated(),
        )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _storages(tensors: Iterable[Tensor], device: torch.device) -> list[Any]:
    """Return the storages of tensors that are on a device, each once."""
    found = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.device.type == device.type and storage.nbytes():
                found[storage._cdata] = storage
    return list(found.values())


def _is_given(storage: Any, args: Any, kwargs: Mapping[str, Any] | None) -> bool:
    """Return whether an op was given a storage, which was there before the step."""
    given = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
    return any(
        t.layout is torch.strided and t.untyped_storage()._cdata == storage._cdata for t in given
    )


def _running_node(frame: Any) -> str | None:
    """Return the name of the node that generated code runs; None outside of such code."""
    for _ in range(FRAMES):
        if frame is None:
            return None
        file = frame.f_code.co_filename
        if file.startswith(GENERATED):
            found = ASSIGNED.match(linecache.getline(file, frame.f_lineno))
            return found[1] if found else ""
        frame = frame.f_back
    return None
