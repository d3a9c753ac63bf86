"""Input guards of exported programs."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.utils.checkpoint


def guards_function(module: torch.nn.Module) -> FunctionType | None:
    """Return the input check of an exported graph from the module that the graph calls.

    Returns None if ``module`` is not such a guards module.
    """
    import inspect

    from torch.export._unlift import GuardsFn

    # The wrapper made by ``dont_skip_tracing`` closes over the check under the name ``func``.
    return (
        inspect.getclosurevars(module.forward).nonlocals["func"]
        if isinstance(module, GuardsFn)
        else None
    )


def guards_namespace() -> dict[str, Any]:
    """Return the globals that input checks of exported graphs refer to."""
    import builtins
    import math

    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    return {**SYMPY_INTERP, "math": math, "inf": math.inf, "__builtins__": builtins}


def guards_module(check: Callable[..., None]) -> torch.nn.Module:
    """Return a guards module by which an exported graph calls its input check."""
    from torch.export._unlift import GuardsFn

    module: Any = GuardsFn()
    module.forward = torch._dynamo.dont_skip_tracing(check)
    module._is_impure = True  # its result is unused; dead code elimination must keep the call
    return module  # type: ignore[no-any-return]
