"""Op log: values read and given by each op of a step, in the forward and in the recompute.

An op of the backward runs in a recompute where gradients are enabled, as only recomputes enable
them there, or where a module runs. Compiled code shows no ops.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt.ops.properties import CHOOSING, UNINITIALIZED
from fxckpt.torch_private import forget_storage, remember_storage, storage_id
from fxckpt.utils.running_module import RunningModule

Phase = Literal["forward", "backward", "recompute"]
OVERWRITING = frozenset(("copy_", "fill_", "zero_"))
"""Ops that write a whole tensor, whatever it held."""
NAMESAKES = frozenset(("alias", "detach"))
"""Ops whose result is their operand under another name: not logged."""
TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)
"""Folders whose lines are not the user's."""


@dataclass(frozen=True)
class Write:
    """A tensor that an op wrote in place."""

    op: str
    """Name of the op."""
    line: str
    """The user's line: ``train.py:12``; empty where there is none."""
    after: int
    """Number of the forward's calls before it."""


@dataclass(frozen=True)
class OpRead:
    """A tensor that an op reads."""

    digest: str
    """Digest of its shape, type and values."""
    holder: str | int | None
    """What it is a view of: the name of a parameter, buffer or input, or else the number of a
    storage; None for a tensor without one."""
    type: str
    """Its type and shape."""
    write: Write | None = None
    """The last write to its storage before it was read."""


@dataclass(frozen=True)
class OpCall:
    """One call of an op."""

    op: str
    """Name of the op: ``aten.mm``."""
    module: str
    """Name of the innermost module that runs; empty outside of all."""
    reads: tuple[OpRead, ...]
    """Tensors whose values it reads."""
    settings: str
    """Its arguments that are no tensors."""
    gives: tuple[str, ...]
    """Digests of the values that it returns or writes."""
    is_random: bool
    """Whether it draws from a generator."""
    is_view: bool
    """Whether its results share memory with its operands."""
    choices: tuple[Tensor, ...] = ()
    """For an op that chooses: its whole-number results."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Values read and settings, which make two calls of an op the same."""
        return self.op, tuple(read.digest for read in self.reads), self.settings


@dataclass
class OpLog:
    """The calls of a step."""

    forward: list[OpCall] = field(default_factory=list)
    """Calls of the forward, in order."""
    recompute: list[OpCall] = field(default_factory=list)
    """Calls of recomputes, in order."""


class OpRecorder(TorchDispatchMode):
    """Log the ops of a step while active.

    Parameters
    ----------
    modules
        Names of the modules, by their id.
    tensors
        A function that returns the parameters, buffers and inputs of that moment, by name.
    """

    def __init__(
        self, modules: Mapping[int, str], tensors: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        super().__init__()
        self.log = OpLog()
        self.phase: Phase = "forward"
        self._running = RunningModule(modules)
        self._tensors = tensors
        self._last: Phase = "forward"
        self._storages: set[int] = set()
        self._names: dict[int, str] = {}
        self._writes: dict[int, Write] = {}
        self._uninitialized: set[int] = set()

    @contextmanager
    def recording(self) -> Iterator[OpLog]:
        """Log the ops and the modules that run them."""
        self._name_storages()
        try:
            with self._running.watched(), self:
                yield self.log
        finally:
            # A storage that was freed kept its number until here.
            forget_storage(list(self._storages))
            self._storages.clear()

    def start_backward(self) -> None:
        """Log the ops from here on as those of the backward."""
        self.phase = "backward"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        phase = self._phase()
        if phase == "recompute" and self._last != phase:
            self._name_storages()  # ``weight.data = ...`` may have given it another.
        self._last = phase
        written, reads, settings = self._arguments(func, args, kwargs)
        result = func(*args, **kwargs)
        results = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if is_overwriting(func) or not (written or _is_view(func)):
            self._note_uninitialized(func, results)
        for tensor in written:
            if (storage := self._storage(tensor)) is not None:
                self._writes[storage] = Write(_name(func), _user_line(), len(self.log.forward))
        if phase == "backward" or not (results or written):
            return result
        if func._opname in UNINITIALIZED or func._opname in NAMESAKES:
            return result
        call = OpCall(
            op=_name(func),
            module=self._running.name,
            reads=reads,
            settings=settings,
            gives=tuple(digest(t) for t in (results or written)),
            is_random=draws_numbers(func),
            is_view=_is_view(func),
            choices=tuple(t.detach().cpu().clone() for t in results if not t.is_floating_point())
            if func._opname in CHOOSING
            else (),
        )
        (self.log.forward if phase == "forward" else self.log.recompute).append(call)
        return result

    def _note_uninitialized(self, func: Any, made: list[Tensor]) -> None:
        """Note the storages whose bytes are uninitialized."""
        storages = {s for tensor in made if (s := self._storage(tensor)) is not None}
        if func._opname in UNINITIALIZED:
            self._uninitialized |= storages
        else:
            self._uninitialized -= storages

    def _arguments(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Tensor], tuple[OpRead, ...], str]:
        """Return an op's written tensors, those whose values it reads, and the rest as text."""
        written: list[Tensor] = []
        reads: list[OpRead] = []
        settings: list[str] = []
        overwrites = is_overwriting(func)
        declared = func._schema.arguments
        named = {argument.name: argument for argument in declared}
        given = [*zip(declared, args, strict=False), *((named[k], v) for k, v in kwargs.items())]
        for argument, value in given:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor):
                    if is_written:
                        written.append(leaf)
                    if not is_written or not (overwrites or self._is_uninitialized(leaf)):
                        reads.append(self._read(leaf))
                elif not isinstance(leaf, torch.Generator):
                    settings.append(f"{argument.name}={leaf!r}")
        return written, tuple(reads), " ".join(settings)

    def _read(self, tensor: Tensor) -> OpRead:
        storage = self._storage(tensor)
        if storage is None:
            return OpRead(digest(tensor), None, _type(tensor))
        holder = self._names.get(storage, storage)
        return OpRead(digest(tensor), holder, _type(tensor), self._writes.get(storage))

    def _is_uninitialized(self, tensor: Tensor) -> bool:
        return self._storage(tensor) in self._uninitialized

    def _storage(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, which no other has while this one records."""
        if tensor.layout is not torch.strided:
            return None
        number = storage_id(tensor)
        if number not in self._storages:
            self._storages.add(remember_storage(tensor))
        return number

    def _name_storages(self) -> None:
        """Name the storages of the parameters, buffers and inputs of this moment."""
        for name, tensor in self._tensors().items():
            if (storage := self._storage(tensor)) is not None:
                self._names[storage] = name

    def _phase(self) -> Phase:
        if self.phase == "backward" and (torch.is_grad_enabled() or self._running.is_any):
            return "recompute"
        return self.phase


def draws_numbers(func: Any) -> bool:
    """Return whether an op draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def is_overwriting(func: Any) -> bool:
    """Return whether an op that writes an argument does not read it."""
    return func._opname in OVERWRITING or "out" in func._overloadname or draws_numbers(func)


def _name(func: Any) -> str:
    return f"{func.namespace}.{func._opname}"


def _is_view(func: Any) -> bool:
    aliases = [r.alias_info for r in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _type(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's shape, type and values."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    raw = plain.resolve_conj().resolve_neg().contiguous().cpu().reshape(-1).view(torch.uint8)
    values = hashlib.blake2b(raw.numpy().tobytes(), digest_size=12).hexdigest()
    return f"{_type(tensor)} {values}"


def _user_line() -> str:
    """Return the innermost line of the stack that is not torch's: ``train.py:12``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, HERE, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
