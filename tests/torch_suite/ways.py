"""Ways to put fxckpt in place of a part of torch, each applied to a whole process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch._dynamo.backends.registry as registry
import torch._functorch.partitioners as partitioners
import torch._inductor.compile_fx  # it imports torch's partitioner by name

import fxckpt

INNER = {
    "inductor": "inductor",
    "aot_eager": "aot_eager",
    "aot_eager_decomp_partition": "aot_eager",
}
"""Inner compiler of the backend that replaces each of torch's."""
PARTITIONERS = ("default_partition", "min_cut_rematerialization_partition")


def backend(inner: str, *, budget: str | None, options: Any = None) -> Callable[..., Any]:
    """Return a backend that makes one of fxckpt for every graph of a process."""

    def compile_graph(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        made = fxckpt.Backend(budget=budget, inner=inner, options=options or None)
        return made(gm, inputs)

    return compile_graph


def swap_backends(*, budget: str | None) -> None:
    """Replace torch's backends, by name and as the default of ``torch.compile``."""
    for name, inner in INNER.items():
        registry.lookup_backend(name)  # torch registers it now, not over ours later
        registry._COMPILER_FNS[name] = backend(inner, budget=budget)

    class Wrapper(torch._TorchCompileInductorWrapper):  # type: ignore[name-defined,misc]
        def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
            return backend("inductor", budget=budget, options=self.config)(gm, inputs)

    torch._TorchCompileInductorWrapper = Wrapper  # type: ignore[attr-defined]


def partition(gm: torch.fx.GraphModule, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Partition a joint graph by fxckpt, in the form of torch's partitioners."""
    kwargs.pop("compiler", None)
    return fxckpt.Partitioner()(gm, inputs, **kwargs)


def swap_partitioners() -> None:
    """Replace torch's partitioners, where they are imported by name and as default arguments."""
    torchs = {id(getattr(partitioners, name)) for name in PARTITIONERS}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith("fxckpt"):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in torchs:
                setattr(module, name, partition)
            elif isinstance(value, FunctionType) and value.__module__ == module.__name__:
                _swap_defaults(value, torchs)


def _swap_defaults(function: FunctionType, torchs: set[int]) -> None:
    function.__defaults__ = function.__defaults__ and tuple(
        partition if id(value) in torchs else value for value in function.__defaults__
    )
    for name, value in (function.__kwdefaults__ or {}).items():
        if id(value) in torchs:
            function.__kwdefaults__[name] = partition


WAYS: dict[str, Callable[[], Any]] = {
    "stock": lambda: None,
    "checkpoint": fxckpt.patch_torch,
    "backend": functools.partial(swap_backends, budget=None),
    "floor": functools.partial(swap_backends, budget="min"),
    "partitioner": swap_partitioners,
}
"""What each way replaces before torch's tests are imported; ``stock`` is torch alone."""
