"""Options of Inductor, its cache folder, and a compile with fxckpt as its partitioner."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn

from fxckpt.errors import InnerCompilerMissing, InvalidOption
from fxckpt.torch_private.inductor.execution_order import KeepExecutionOrder

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Size and strides of a tensor."""


def cache_folder() -> Path | None:
    """Return the folder of Inductor's caches; None if its cache of compiled graphs is off."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) if config.fx_graph_cache and not config.force_disable_caches else None


PLUGS = ("custom_partitioner_fn", "_pre_fusion_custom_pass")
"""Inductor's options through which fxckpt is plugged in."""


def configuration() -> str:
    """Return Inductor's and AOTAutograd's options as text, without :data:`PLUGS`."""
    from torch._functorch import config as functorch

    return (
        repr(sorted((name, repr(value)) for name, value in functorch.get_config_copy().items()))
        + inductor_configuration()
    )


def inductor_configuration() -> str:
    """Return Inductor's options as text, without :data:`PLUGS`."""
    from torch._inductor import config as inductor

    return repr(
        sorted(
            (name, repr(value))
            for name, value in inductor.get_config_copy().items()
            if name not in PLUGS
        )
    )


def draws_as_eager() -> bool:
    """Return whether Inductor is to draw the random numbers that eager mode would."""
    from torch._inductor import config

    return bool(config.fallback_random)


def drawing_as_eager(draws: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Inductor draws the random numbers of eager mode, or its own."""
    from torch._inductor import config

    return config.patch(fallback_random=draws)  # type: ignore[no-any-return]


def inductor_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options that ``torch.compile(mode=..., options=...)`` would set in Inductor.

    Raises :class:`~fxckpt.errors.InvalidOption`.
    """
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if mode is not None and (not isinstance(mode, str) or mode not in modes):
        raise InvalidOption(
            f"mode={mode!r} is not a mode of torch.compile. "
            f"Use one of {', '.join(map(repr, modes))}."
        )
    if options is not None and not (
        isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
    ):
        raise InvalidOption(
            f"options={options!r} are not Inductor's options by their names. Give a dict. "
            "Example: options={'epilogue_fusion': True}."
        )
    given = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    _check_names(given)
    _check_types(given)
    return {**(modes[mode] if mode is not None else {}), **given}


def _check_names(given: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidOption` for options that Inductor lacks, or that fxckpt takes itself."""
    from torch._inductor import config

    if taken := [name for name in PLUGS if given.get(name) is not None]:
        raise InvalidOption(
            f"option {taken[0]!r} is where fxckpt itself is plugged into Inductor: "
            "it cannot be given beside fxckpt. Leave it out."
        )
    known = config.get_config_copy()
    unknown = [name for name in given if name not in known]
    if unknown:
        near = get_close_matches(unknown[0], known, 3)
        raise InvalidOption(
            f"unknown option {unknown[0]!r}: neither fxckpt nor Inductor has it."
            + (
                f" Did you mean {' or '.join(map(repr, near))}?"
                if near
                else " torch._inductor.config lists Inductor's."
            )
        )


def _check_types(given: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidOption` for values of other types than Inductor's options have."""
    from torch._inductor import config

    for name, value in given.items():
        kind = config.get_type(name)  # type: ignore[attr-defined]
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise InvalidOption(
                f"option {name!r} is {value!r}: Inductor takes one of "
                f"{', '.join(map(repr, get_args(kind)))}."
            )
        # As in torch.compile, items of a list or a dict are not checked.
        if get_origin(kind) is None and not isinstance(value, kind):
            raise InvalidOption(
                f"option {name!r} is {value!r}, a {type(value).__name__}: "
                f"Inductor takes {kind.__name__}."
            )


def _detect_instructions_early(options: Mapping[str, Any]) -> None:
    """Start Inductor's detection of vector instructions while the graph is traced and planned.

    The detection runs a compiler, which takes long with an empty cache; Inductor would wait for it
    when it writes the first kernel.
    """
    from torch._inductor import config, cpu_vec_isa

    def detect() -> None:
        with contextlib.suppress(Exception):  # The compile raises it again, with its message.
            cpu_vec_isa.valid_vec_isa_list()

    with config.patch(dict(options)):
        here = contextvars.copy_context()
    threading.Thread(target=here.run, args=(detect,), daemon=True).start()


def inductor_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    partitioner: CustomPartitionerFn,
    keep_order: KeepExecutionOrder,
    options: Mapping[str, Any],
    compile_half: Callable[..., Any],
) -> Any:
    """Compile a graph with Inductor, partitioned by ``partitioner``, each half by ``compile_half``.

    Inductor's joint passes and caches are in force. AOTAutograd's own cache is off: a hit would
    skip the partitioner, and with it the plan that the user can read. The code of both halves still
    comes from Inductor's cache.

    Raises :class:`~fxckpt.errors.InnerCompilerMissing` if Inductor finds no compiler.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.exc import InductorError, InvalidCxxCompiler, TritonMissing

    patches = {
        **options,
        "custom_partitioner_fn": partitioner,
        "_pre_fusion_custom_pass": keep_order,
    }
    if any(
        isinstance(given, torch.Tensor) and given.device.type == "cpu" for given in example_inputs
    ):
        _detect_instructions_early(options)
    try:
        with config.patch(enable_autograd_cache=False):
            return compile_fx(
                gm, list(example_inputs), inner_compile=compile_half, config_patches=patches
            )
    except (InductorError, TritonMissing) as error:
        found = getattr(error, "inner_exception", error)
        if not isinstance(found, (InvalidCxxCompiler, TritonMissing)):
            raise
        raise no_compiler(found) from error


def no_compiler(error: Exception) -> InnerCompilerMissing:
    """Return the error for an Inductor that finds no compiler for its code."""
    return InnerCompilerMissing(
        f"inner='inductor' cannot generate code here: {str(error).rstrip(chr(46))}. "
        "Two ways out: install a compiler (g++ or clang++ for the CPU, CXX names it; Triton for a "
        "GPU), or do without code generation: options={'inner': 'aot_eager'}, "
        "fxckpt.Backend(inner='aot_eager')."
    )
