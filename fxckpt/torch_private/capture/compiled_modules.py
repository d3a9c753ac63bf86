"""Modules compiled in place, those of one class by one code, apart from all other compilations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import getattr_static
from types import FunctionType, MethodType
from typing import Any

import torch
from torch._dynamo import OptimizedModule

from fxckpt.torch_private.capture.dynamo import isolated


class ModuleCompiler:
    """Compiles modules in place by one backend, as ``module.compile()`` does, containers included.

    Modules of one class share their code, and their compilations count towards no limit of others:
    Dynamo keeps those of one class together, whoever compiled them, and runs the class in Python
    once there are 8 of them.

    Dynamo compiles no frame of torch's own, such as the forward of ``nn.Sequential``, unless a
    frame of another file calls it. Such modules share no compiled code.
    """

    def __init__(self, backend: Callable[..., Any], **options: Any) -> None:
        self._backend, self._options = backend, options
        # As for module.compile(), hooks stay outside: Dynamo skips this frame of torch's own.
        self._call = torch.compile(
            torch.nn.Module._call_impl, backend=backend, **isolated(), **options
        )

    def compile(self, module: torch.nn.Module, *, only_with_gradients: bool = False) -> None:
        """Compile a module in place.

        With ``only_with_gradients`` calls where gradients are off run as if it were not compiled.
        """
        compiled = self._container(module) if is_container(module) else self._own(module)
        if only_with_gradients:
            compiled = _with_gradients(compiled, module)
        module._compiled_call_impl = compiled

    def _own(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Return what runs a module of a class that is not torch's."""
        return MethodType(self._call, module)

    def _container(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Return what runs a module of torch's own."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        # Dynamo's limit of recompilations is one per code object.
        call.__code__ = call.__code__.replace()
        compiled: Callable[..., Any] = torch.compile(call, backend=self._backend, **self._options)
        return compiled


def is_container(module: torch.nn.Module) -> bool:
    """Return whether a module's class is torch's own, whose ``forward`` Dynamo skips."""
    return type(module).__module__.startswith("torch.nn.")


def _with_gradients(compiled: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    """Return what runs a module compiled where gradients are on, and else in Python."""

    def choose(*args: Any, **kwargs: Any) -> Any:
        run = compiled if torch.is_grad_enabled() else module._call_impl
        return run(*args, **kwargs)

    return choose


def compiled_parts(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the outermost modules inside a module that the user compiled, by name."""
    found: dict[str, torch.nn.Module] = {}
    for name, part in module.named_modules():
        is_inside = any(not above or name.startswith(f"{above}.") for above in found)
        if not is_inside and _is_compiled(part):
            found[name] = part
    return found


def _is_compiled(module: torch.nn.Module) -> bool:
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled or isinstance(module, OptimizedModule)


def give_own_code(modules: Iterable[torch.nn.Module]) -> None:
    """Give modules copies of the code of their forwards, one for each class.

    What Dynamo compiles of a code counts towards the limits of all that run it, and goes with it.
    """
    copies: dict[FunctionType, FunctionType] = {}
    for module in modules:
        forward = getattr_static(type(module), "forward", None)
        if not isinstance(forward, FunctionType) or is_container(module):
            continue
        if "forward" not in vars(module):
            if forward not in copies:
                copies[forward] = _copied(forward)
            module.forward = MethodType(copies[forward], module)


def with_own_code(container: torch.nn.Module) -> Callable[..., Any]:
    """Return a function that calls a container of torch's, as ``torch.compile`` does.

    That is by a function whose code all containers share; this one has a copy.
    """
    from torch._dynamo.external_utils import wrap_inline

    called: Any = wrap_inline(container)
    return _copied(called)


def _copied(function: FunctionType) -> FunctionType:
    """Return a function that does the same by code of its own."""
    code, names = function.__code__.replace(), function.__globals__
    made = FunctionType(code, names, None, function.__defaults__, function.__closure__)
    made.__kwdefaults__, made.__module__ = function.__kwdefaults__, function.__module__
    made.__annotations__ = function.__annotations__
    made.__dict__.update(function.__dict__)
    return made


def forget_compilations(backend: Callable[..., Any]) -> None:
    """Let go of what Dynamo keeps of the compilations by a backend: code, guards and graphs.

    Empty entries of its cache stay where the code does.
    """
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, cached_backends
    from torch._dynamo.guards import DeletedGuardManagerWrapper
    from torch._dynamo.utils import get_metrics_context

    def is_of(other: Any) -> bool:
        return getattr(other, "compiler_fn", other) is backend

    for reference in tuple(input_codes.seen):
        if (code := reference()) is None:
            continue
        for entry in _debug_get_cache_entry_list(code):
            state = getattr(entry.guard_manager, "extra_state", None)
            if is_of(entry.backend) and state is not None:
                state.invalidate(entry, DeletedGuardManagerWrapper("the backend is done"))
    for key in [key for key, other in cached_backends.items() if is_of(other)]:
        del cached_backends[key]
    # Stacks of the latest compile, which hold the code that its frames ran.
    getattr(get_metrics_context(), "_edits", []).clear()
