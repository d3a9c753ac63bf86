"""The autograd engine and its hooks for saved tensors."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint
from torch import fx


def frees_incoming_gradients() -> bool:
    """Return whether a compiled backward can free the gradients passed to it.

    With ``boxed_grads_call`` (pytorch#177837) the autograd engine hands over its only reference to
    them; without it they live until the compiled backward returns.
    """
    return hasattr(torch.autograd.Function, "boxed_grads_call")


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Run ops below autograd and autocast, at the level at which they were recorded.

    Grad mode is on, like in the region, because some kernels depend on it: mkldnn's LSTM returns
    its workspace only in grad mode.
    """
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        yield


def current_backward() -> object | None:
    """Return an identity of the running backward: its ``GraphExecGroup``, else its task number.

    Returns None outside of any backward.
    """
    group = torch._C._get_graph_exec_group()
    if group is not None:
        return group
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def kept_alone(found: weakref.ref[torch.Tensor]) -> bool:
    """Return whether a tensor is saved for one backward node, and nothing else holds its memory."""
    return _holders(found) == _holders_of_a_saved_one()


def _holders(found: weakref.ref[torch.Tensor]) -> tuple[int, int, int] | None:
    """Return the references to a tensor, by Python and C++, and to its storage; None if gone."""
    tensor = found()
    if tensor is None:
        return None
    storage = tensor.untyped_storage()._cdata
    counts = tensor._use_count(), torch._C._storage_Use_Count(storage)  # type: ignore[attr-defined]
    return sys.getrefcount(tensor), *counts


@functools.cache
def _holders_of_a_saved_one() -> tuple[int, int, int] | None:
    """Return the numbers for a tensor that one node saves: versions of torch count differently."""

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients

    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True).clone()
        found, saving = weakref.ref(x), Saving.apply(x)
    del x
    counts = _holders(found)
    del saving
    return counts


def at_engine_exit(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the autograd engine ends the backward that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the running backward.

    Does nothing inside a ``GraphExecGroup``: more backwards of the same group may follow.
    """
    if torch._C._get_graph_exec_group() is None:
        at_engine_exit(callback)


def surrounding_hooks() -> (
    tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None
):
    """Return the active default hooks for saved tensors (pack, unpack), or None."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def is_transformed() -> bool:
    """Return whether a ``torch.func`` transform is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def let_autograd_own(node: fx.Node) -> None:
    """Have AOTAutograd save a value by ``save_for_backward``.

    AOTAutograd keeps a value on ``ctx``, without a version check, if the user's
    ``autograd.Function`` did so. The value may then be written to before the backward, but lives
    until the autograd graph is freed. A value that nothing outside the compiled graphs can write
    to needs no such exemption.
    """
    node.meta.pop("saved_tensor_with_no_vc_check", None)


def keep_saved_values() -> None:
    """Declare, while AOTAutograd compiles a backward, that it does not overwrite saved values.

    AOTAutograd refuses ``retain_graph`` wherever it found saved values that could be "donated" to
    the backward (pytorch#130580), though Inductor alone reuses their memory.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def in_backward() -> bool:
    """Return whether autograd's engine runs a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
