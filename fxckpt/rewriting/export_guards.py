"""Guards: the input checks of an exported graph as data that pickles.

Torch generates a function for them and does not keep its source. Here its bytecode is kept, which
only the version of Python that made it can read.
"""

from __future__ import annotations

import marshal
import sys
import types
from dataclasses import dataclass

from torch import nn

from fxckpt.errors import CaptureError
from fxckpt.torch_private import guards_function, guards_module, guards_namespace


@dataclass(frozen=True)
class Guards:
    """The checks as bytecode."""

    code: bytes
    """The marshalled code object."""
    python: tuple[int, int]
    """Major and minor version of the Python that made the code."""

    def load(self) -> nn.Module:
        """Return the module that runs the checks.

        Raises :class:`CaptureError` under another version of Python.
        """
        if self.python != sys.version_info[:2]:
            made, here = (
                ".".join(map(str, version)) for version in (self.python, sys.version_info[:2])
            )
            raise CaptureError(
                f"this graph was exported and pickled under Python {made}, and its input checks "
                f"are code that Python {here} cannot read. Unpickle it there, or export it without "
                "them: torch.export.export(...).module(check_guards=False)."
            )
        # Loading code is no less safe than loading the pickle around it.
        return guards_module(types.FunctionType(marshal.loads(self.code), guards_namespace()))


def guards_of(module: nn.Module) -> Guards | None:
    """Return the checks of an exported graph's guards module, or None for any other module."""
    check = guards_function(module)
    return None if check is None else Guards(marshal.dumps(check.__code__), sys.version_info[:2])
