"""Autograd engine and saved-tensor hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint
from torch import fx


def frees_incoming_gradients() -> bool:
    """Return whether the autograd engine hands over its only reference to a gradient, so that the compiled backward can let go of it."""
    return hasattr(torch.autograd.Function, "boxed_grads_call")


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Run ops without autograd and without autocast, as they ran below both.

    Grad mode is on as it was in the region: some kernels look at it (mkldnn's LSTM makes its workspace only then).
    """
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        yield


def current_backward() -> object | None:
    """Return what tells the running backward from others: its ``GraphExecGroup``, or its number; None outside of any."""
    group = torch._C._get_graph_exec_group()
    if group is not None:
        return group
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the running backward, unless it belongs to a ``GraphExecGroup``, of which there may be more."""
    if torch._C._get_graph_exec_group() is None:
        torch.autograd.Variable._execution_engine.queue_callback(callback)


def surrounding_hooks() -> (
    tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None
):
    """Return the hooks for saved tensors that are in force: pack and unpack."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def is_transformed() -> bool:
    """Return whether a ``torch.func`` transform is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def let_autograd_own(node: fx.Node) -> None:
    """Have a value saved by ``save_for_backward``, though a user's ``autograd.Function`` kept it on its ``ctx``.

    What AOTAutograd keeps on a ``ctx``, so that it may be written to before the backward, is there until the backward's graph dies. A value that
    nobody outside the compiled graphs can write to needs none of that.
    """
    node.meta.pop("saved_tensor_with_no_vc_check", None)


def keep_saved_values() -> None:
    """Tell AOTAutograd, while it compiles a backward, that nothing writes into saved values, so that the graph can be retained.

    Only Inductor reuses ("donated") saved values; AOTAutograd refuses ``retain_graph`` wherever it found values that could be.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []
