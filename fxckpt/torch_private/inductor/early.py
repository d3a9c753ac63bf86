"""C++ kernels compiled while the code of others is still being written.

Inductor writes the code of a whole half first, and then hands its kernels to the C++ compiler. Here each goes as soon as it is written, so that the
time in which Inductor writes the rest, on one core, is not lost; what Inductor hands over in the end is compiled by then, or under way.
"""

from __future__ import annotations

import ast
from typing import Any

WRITTEN_AS = "async_compile.cpp_pybinding("
"""How the code of a half defines a C++ kernel: with the types of its arguments and its source."""


def compile_early(wrapper: Any) -> None:
    """Let a half's wrapper code, which is yet to be written, hand each C++ kernel to the compiler when the kernel is defined."""
    define_kernel = wrapper.define_kernel

    def defined(kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> None:
        define_kernel(kernel_name, kernel_body, *args, **kwargs)
        if kernel_body.startswith(WRITTEN_AS):
            _submit(kernel_body)

    wrapper.define_kernel = defined


def _submit(kernel_body: str) -> None:
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    if get_compile_threads() > 1:
        try:
            call = ast.parse(kernel_body.strip(), mode="eval").body
        except SyntaxError:
            return  # Inductor meets it again when it runs the code, and says in which file it is.
        # A call of another form, by a torch to come, is left to Inductor.
        if isinstance(call, ast.Call) and len(call.args) == 2 and not call.keywords:
            argument_types, source = map(ast.literal_eval, call.args)
            # Inductor keeps this by the source, and finds it when it asks for the same.
            CppPythonBindingsCodeCache.load_pybinding_async(
                argument_types, source, submit_fn=AsyncCompile.submit
            )
