"""Backwards of graphs that AOTAutograd compiled, as autograd runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch._dynamo import compiled_autograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

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
    _watch_function(node._forward_cls)


def watching_donations(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled graph of whose backward :func:`donated_inputs` knows what is donated."""

    def call(*args: Any) -> Any:
        outputs = run(*args)
        if (node := backward_node(outputs)) is not None:
            _watch_function(node._forward_cls)
        return outputs

    return call


def _watch_function(function: Any) -> None:
    """Have the class of a compiled graph's autograd nodes tell their watchers of backwards."""
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
        _donations.note(ctx)
        return key(ctx)

    not_compiled(watched_backward)
    not_compiled(watched_key)
    function.backward = staticmethod(watched_backward)
    function._compiled_autograd_key = staticmethod(watched_key)
    function._fxckpt_watcher = None


class _Donations:
    """Storages that saved values have to themselves, in the latest backward of compiled autograd.

    AOTAutograd donates them to the compiled backward of their graph, which may write there.
    Compiled autograd's graph takes them as inputs like any other.
    """

    def __init__(self) -> None:
        self._task = -1
        self._storages: set[StorageWeakRef] = set()

    def note(self, ctx: Any) -> None:
        """Add those of one node, which compiled autograd is about to trace or to run."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._storages = task, set()
        metadata = ctx._forward_cls.metadata
        saved, first = ctx._raw_saved_tensors, metadata.num_symints_saved_for_bw or 0
        for i in metadata.bw_donated_idxs or ():
            value = saved[i - first] if i - first < len(saved) else None
            # What a hook of the user packed, the user may keep.
            if value is not None and value.unpack_hook is None:
                self._storages.add(StorageWeakRef(value.data.untyped_storage()))

    def among(self, tensors: Sequence[Any]) -> tuple[int, ...]:
        """Return the positions of the tensors that are the only ones in a storage of these."""
        if self._task != torch._C._current_graph_task_id():
            return ()
        held = [
            StorageWeakRef(t.untyped_storage()).cdata
            if isinstance(t, torch.Tensor) and t.layout is torch.strided
            else None
            for t in tensors
        ]
        times, donated = Counter(held), {storage.cdata for storage in self._storages}
        return tuple(i for i, at in enumerate(held) if at in donated and times[at] == 1)


_donations = _Donations()


def donated_inputs(example_inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions, among the leaves of the inputs, of what a whole backward may write.

    They are saved values of graphs that :func:`watch_backward` or :func:`watching_donations` saw,
    which nothing reads after the graph unless it is kept. Empty outside of compiled autograd, whose
    function has all its tensors in one list; a function that it calls, or what resumes it after a
    graph break, has them apart, and its caller may read them later.
    """
    if not is_in_compiled_backward() or not any(isinstance(x, list) for x in example_inputs):
        return ()
    return _donations.among(pytree.tree_leaves(list(example_inputs)))


def copying_kept(run: Callable[..., Any], donated: Sequence[int]) -> Callable[..., Any]:
    """Return a whole backward that writes to copies of its donated inputs if the graph is kept."""

    def call(*args: Any) -> Any:
        if not keeps_graph():
            return run(*args)
        leaves, spec = pytree.tree_flatten(args)
        for i in donated:
            leaves[i] = leaves[i].clone()
        return run(*pytree.tree_unflatten(leaves, spec))

    return call


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
