"""Runs of a forward that may be repeated when memory is short."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from fxckpt.torch_private import default_generator


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device or torch's CPU allocator has no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't alloc" in str(error)


def free_memory() -> None:
    """Free what only cycles hold, and what allocators cache."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


@dataclass(frozen=True)
class GeneratorStates:
    """States of the default generators before a forward."""

    begun: tuple[tuple[torch.Generator, torch.Generator], ...]
    """Generators with a copy of each."""

    @classmethod
    def of(cls, device: torch.device) -> GeneratorStates:
        """Return the states on the CPU and on the device of a graph."""
        devices = dict.fromkeys((torch.device("cpu"), device))
        found = [g for d in devices if (g := default_generator(d)) is not None]
        return cls(tuple((g, g.clone_state()) for g in found))

    def restore(self) -> None:
        """Set the generators back, so that the next run draws the same."""
        for generator, begun in self.begun:
            generator.set_state(begun.get_state())
