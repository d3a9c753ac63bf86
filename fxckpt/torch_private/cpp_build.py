"""Commands that compile C++ against torch's own headers."""

from __future__ import annotations

from pathlib import Path

import torch


def cpp_command(source: Path, library: Path) -> list[str]:
    """Return the command that compiles ``source`` into a shared ``library`` linked to ``c10``.

    The compiler and the C++ standard are those of Inductor: ``$CXX``, else the machine's.

    Raises
    ------
    RuntimeError
        The machine has no C++ compiler.
    """
    # Importing Inductor takes long, and a library is compiled once.
    from torch._inductor.cpp_builder import _get_cpp_std_cflag, get_cpp_compiler

    torch_folder = Path(torch.__file__).parent
    return [
        get_cpp_compiler(),
        *(f"-{flag}" for flag in _get_cpp_std_cflag()),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
        f"-I{torch_folder / 'include'}",
        *(str(source), "-o", str(library)),
        *(f"-L{torch_folder / 'lib'}", "-lc10"),
    ]
