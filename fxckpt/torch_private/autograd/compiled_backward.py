"""Backwards of graphs that AOTAutograd compiled, as autograd runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch._dynamo import compiled_autograd

from fxckpt.torch_private.capture.dynamo import not_compiled


class BackwardWatcher(Protocol):
    """Listener to the backwards of one call."""

    def enter(self) -> None:
        """Note that a backward begins."""

    def leave(self) -> None:
        """Note that it ended."""

    def failed(self, error: BaseException) -> None:
        """Note that it raised an error."""

    def unseen(self) -> None:
        """Note that compiled autograd runs it as a part of a graph of its own."""


def is_in_compiled_backward() -> bool:
    """Return whether a graph that compiled autograd made is being run, or compiled for its run."""
    return bool(compiled_autograd.in_compiled_autograd_region)


def backward_node(outputs: Any) -> Any:
    """Return the autograd node of AOTAutograd's compiled function behind its outputs, if any."""
    for output in _tensors(outputs):
        node = output.grad_fn
        for _ in range(4):  # The wrapper may have made views of what the function returned.
            if node is None or type(node).__name__ == "CompiledFunctionBackward":
                break
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None and type(node).__name__ == "CompiledFunctionBackward":
            return node
    return None


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
        if isinstance(output, torch.Tensor):
            yield output


def watch_backward(node: Any, watcher: BackwardWatcher) -> None:
    """Tell ``watcher`` of every backward of a node that :func:`backward_node` returned.

    Hooks of the node would keep its incoming gradients alive until its backward ends, and compiled
    autograd would trace them.
    """
    node._fxckpt_watcher = watcher
    function = node._forward_cls
    if "_fxckpt_watcher" in vars(function):
        return
    backward, key = function.backward, function._compiled_autograd_key

    def watched_backward(ctx: Any, *gradients: Any) -> Any:
        watcher: BackwardWatcher | None = getattr(ctx, "_fxckpt_watcher", None)
        if watcher is None:
            return backward(ctx, *gradients)
        watcher.enter()
        try:
            result = backward(ctx, *gradients)
        except BaseException as error:
            watcher.failed(error)
            raise
        watcher.leave()
        return result

    def watched_key(ctx: Any) -> Any:
        if (watcher := getattr(ctx, "_fxckpt_watcher", None)) is not None:
            watcher.unseen()
        return key(ctx)

    not_compiled(watched_backward)
    not_compiled(watched_key)
    function.backward = staticmethod(watched_backward)
    function._compiled_autograd_key = staticmethod(watched_key)
    function._fxckpt_watcher = None


def has_saved_values(node: Any) -> bool:
    """Return whether a node that :func:`backward_node` returned still has its saved values."""
    try:
        # Raw: nothing is unpacked, and no hook is called.
        _ = node._raw_saved_tensors
    except RuntimeError:
        return False  # A backward has freed them.
    return True


def keeps_graph() -> bool:
    """Return whether the running backward keeps the saved values (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
