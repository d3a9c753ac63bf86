"""Repro files: a joint graph that could not be planned, as text that any machine plans again."""

from __future__ import annotations

import hashlib
import json
import platform
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxckpt.errors import InvalidOption
from fxckpt.ops.properties import tensors
from fxckpt.plans.graph_json import NotWritable, from_json, to_json
from fxckpt.torch_private import size_hint
from fxckpt.torch_private.inductor.options import draws_as_eager
from fxckpt.utils.cache_folder import cache_dir

VERSION = 2
"""Version of the format, which a reader checks."""


@dataclass(frozen=True)
class Repro:
    """A joint graph that could not be planned."""

    error: str
    """The error, with its traceback."""
    options: str
    """Options of the planner, as Python prints them."""
    torch: str
    """Version of torch."""
    python: str
    """Version of Python."""
    num_fwd_outputs: int
    """Number of leading outputs that belong to the forward."""
    inputs: tuple[str, ...]
    """The graph's inputs, a line each: name, dtype, shape, strides and device."""
    graph: str
    """The graph as code, with the shape of every value."""
    settings: dict[str, Any]
    """Arguments of the planner that are numbers and text; other ones are in ``options`` alone."""
    inner: str | None
    """Inner compiler, if it is Inductor."""
    nodes: list[dict[str, Any]]
    """The graph in the form of :mod:`fxckpt.plans.graph_json`; empty if it has none."""
    no_nodes: str
    """Parts of the graph that have no such form."""
    fallback_random: bool = False
    """Whether Inductor was told to draw eager's random numbers, which changes the graph."""
    version: int = VERSION
    """Version of this form."""

    def __str__(self) -> str:
        inputs = "\n".join(f"  {line}" for line in self.inputs)
        return (
            f"{self.options}, torch {self.torch}, Python {self.python}\n\n{self.error.strip()}\n\n"
            f"inputs, of which the first {self.num_fwd_outputs} outputs are the forward's:\n"
            f"{inputs}\n\n{self.graph}"
        )

    def joint(self) -> fx.GraphModule:
        """Return the joint graph, on fake tensors.

        Raises :class:`~fxckpt.errors.InvalidOption` if the file lacks it, or if the graph calls an
        op that is not registered here.
        """
        if not self.nodes:
            raise InvalidOption(
                f"the graph cannot be planned again from its file: {self.no_nodes}."
            )
        return from_json(self.nodes)


def save(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    options: str,
    error: Exception,
    *,
    settings: Mapping[str, Any],
    inner: str | None,
) -> Path:
    """Write the repro of a joint graph to the cache folder; return its path."""
    try:
        nodes, no_nodes = to_json(joint.graph), ""
    except NotWritable as reason:
        nodes, no_nodes = [], str(reason)
    written = Repro(
        error="".join(traceback.format_exception(error)),
        options=options,
        torch=torch.__version__,
        python=platform.python_version(),
        num_fwd_outputs=num_fwd_outputs,
        inputs=tuple(_line(node) for node in joint.graph.find_nodes(op="placeholder")),
        graph=joint.print_readable(print_output=False, include_stride=True),
        settings={
            name: value
            for name, value in settings.items()
            if value is None or isinstance(value, (int, float, str))
        },
        inner=inner,
        nodes=nodes,
        no_nodes=no_nodes,
        fallback_random=draws_as_eager(),
    )
    text = json.dumps(asdict(written), indent=1)
    folder = cache_dir() / "repros"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    path.write_text(text, encoding="utf-8")
    return path


def load(path: Path) -> Repro:
    """Return the repro in a file. Raises :class:`~fxckpt.errors.InvalidOption` for another file."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data.get("version") != VERSION:
            raise ValueError(f"its form has version {data.get('version')!r}, not {VERSION}")
        return Repro(**{**data, "inputs": tuple(data["inputs"])})
    except OSError as error:
        raise InvalidOption(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidOption(f"{path} is no repro file of fxckpt: {error}.") from error


def _line(node: fx.Node) -> str:
    value = node.meta.get("val")
    tensor = next(tensors(value), None)
    if tensor is None:
        return f"{node.name}: {value}"
    shape, strides = (tuple(map(size_hint, sizes)) for sizes in (tensor.shape, tensor.stride()))
    return f"{node.name}: {tensor.dtype} {shape} strides {strides} on {tensor.device}"
