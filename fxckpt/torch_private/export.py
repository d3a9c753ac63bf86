"""Input checks of exported programs."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.utils.checkpoint


def guards_function(module: torch.nn.Module) -> FunctionType | None:
    """Return the function that checks the inputs of an exported graph, of the module by which the graph calls it; None for any other module."""
    import inspect

    from torch.export._unlift import GuardsFn

    # Dynamo's wrapper calls it ``func``.
    return (
        inspect.getclosurevars(module.forward).nonlocals["func"]
        if isinstance(module, GuardsFn)
        else None
    )


def guards_namespace() -> dict[str, Any]:
    """Return the names that input checks of exported graphs know."""
    import builtins
    import math

    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    return {**SYMPY_INTERP, "math": math, "inf": math.inf, "__builtins__": builtins}


def guards_module(check: Callable[..., None]) -> torch.nn.Module:
    """Return the module by which an exported graph calls its input checks."""
    from torch.export._unlift import GuardsFn

    module: Any = GuardsFn()
    module.forward = torch._dynamo.dont_skip_tracing(check)
    module._is_impure = True  # nobody uses what it returns
    return module  # type: ignore[no-any-return]
