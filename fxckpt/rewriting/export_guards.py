"""Guards: the input checks of an exported graph as data that pickles.

Torch makes a function of them, whose text is not kept. What is kept here is its code, which only the version of Python that made it reads.
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
    """The checks as code."""

    code: bytes
    python: tuple[int, int]

    def load(self) -> nn.Module:
        """Return the module that checks. Raises :class:`CaptureError` under another version of Python."""
        if self.python != sys.version_info[:2]:
            made, here = (
                ".".join(map(str, version)) for version in (self.python, sys.version_info[:2])
            )
            raise CaptureError(
                f"this graph was exported and pickled under Python {made}, and its input checks are code that Python {here} cannot read. Unpickle "
                "it there, or export it without them: torch.export.export(...).module(check_guards=False)."
            )
        return guards_module(
            types.FunctionType(marshal.loads(self.code), guards_namespace())
        )  # no worse than a pickle


def guards_of(module: nn.Module) -> Guards | None:
    """Return the checks of the module by which an exported graph makes them; None for any other module."""
    check = guards_function(module)
    return None if check is None else Guards(marshal.dumps(check.__code__), sys.version_info[:2])
