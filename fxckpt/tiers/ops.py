"""The four ops that move a value off its device and back.

::

    held = send(value)            begins a copy of the value's storage
    held = sent(held, value)      waits for it; the last reader of the value
    value = fetch(held)           takes memory on the device, and begins to fill it
    value = fetched(value, held)  waits for it; every reader reads its result

Each reads what must outlive it, so that any executor that runs an op after its inputs and frees a
value after its last reader is free of races, and needs no knowledge of streams. What moves is the
storage, byte for byte; strides, offset and dtype stay.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxckpt.errors import OffloadMismatch
from fxckpt.tiers.tier import Tier, tier_numbered
from fxckpt.torch_private import OpOverload, functional_kernel, laid_out

SCHEMAS = {
    "send": "(Tensor value, int tier) -> Tensor",
    "sent": "(Tensor(a) held, Tensor value, int tier) -> Tensor(a)",
    "fetch": "(Tensor held, int tier, Device device) -> Tensor",
    "fetched": "(Tensor(a) value, Tensor held, int tier) -> Tensor(a)",
}
for _name, _schema in SCHEMAS.items():
    # What comes back has the layout that was sent, whichever that is. Inductor lowers the other two
    # by rules of their own, which a tag would overrule.
    layout = (torch.Tag.flexible_layout,) if _name in ("fetch", "fetched") else ()
    torch.library.define(f"fxckpt::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag, *layout))
    for _key in ("Conjugate", "Negative"):
        # Else each op would read a copy of its own of a value that is conjugated or negated lazily.
        torch.library.impl(f"fxckpt::{_name}", _key, torch.library.fallthrough_kernel)


@torch.library.impl("fxckpt::send", "CompositeExplicitAutograd")
def _send(value: Tensor, tier: int) -> Tensor:
    place = tier_numbered(tier)
    block = place.take(value.untyped_storage().nbytes())
    place.copies[block.data_ptr()] = place.send(value, block)
    place.sources[block.data_ptr()] = _address(value)
    return laid_out(block, _geometry(value))


@torch.library.impl("fxckpt::sent", "CompositeExplicitAutograd")
def _sent(held: Tensor, value: Tensor, tier: int) -> Tensor:
    place, address = tier_numbered(tier), _address(held)
    place.copies[address].result()
    if place.sources[address] != _address(value):
        raise OffloadMismatch(
            f"{tuple(value.shape)} values were copied for the op that sends them, and the copy may "
            "be gone before it is sent: the gradients would be wrong. The compiler of this graph "
            "copies what an op reads: let fxckpt.Backend compile it, or plan without offload=."
        )
    return held


@torch.library.impl("fxckpt::fetch", "CompositeExplicitAutograd")
def _fetch(held: Tensor, tier: int, device: torch.device) -> Tensor:
    place = tier_numbered(tier)
    nbytes = held.untyped_storage().nbytes()
    value = laid_out(torch.empty(nbytes, dtype=torch.uint8, device=device), _geometry(held))
    copy = place.fetch(held, value)
    if place.lends(held):
        place.copies[_address(held)] = copy
    else:
        copy.result()  # A user's hook moved what was sent to memory whose end nobody tells.
    return value


@torch.library.impl("fxckpt::fetched", "CompositeExplicitAutograd")
def _fetched(value: Tensor, held: Tensor, tier: int) -> Tensor:
    place = tier_numbered(tier)
    if place.lends(held):
        place.copies[_address(held)].result()
    return value


def _fake_send(value: Tensor, tier: int) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


def _fake_sent(held: Tensor, value: Tensor, tier: int) -> Tensor:
    return held


def _fake_fetch(held: Tensor, tier: int, device: torch.device) -> Tensor:
    return torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=device)


def _fake_fetched(value: Tensor, held: Tensor, tier: int) -> Tensor:
    return value


torch.library.register_fake("fxckpt::send", _fake_send)
torch.library.register_fake("fxckpt::sent", _fake_sent)
torch.library.register_fake("fxckpt::fetch", _fake_fetch)
torch.library.register_fake("fxckpt::fetched", _fake_fetched)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _geometry(
    tensor: Tensor,
) -> tuple[int | torch.SymInt, tuple[int, ...], tuple[int, ...], torch.dtype, bool, bool]:
    """Return the geometry by which :func:`~fxckpt.torch_private.laid_out` lays a storage out."""
    return (
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


send: OpOverload = torch.ops.fxckpt.send.default
sent: OpOverload = torch.ops.fxckpt.sent.default
fetch: OpOverload = torch.ops.fxckpt.fetch.default
fetched: OpOverload = torch.ops.fxckpt.fetched.default
MOVES = (send, sent, fetch, fetched)
"""The four ops."""
for _alias in (sent, fetched):
    torch.library.impl(_alias.name(), "Functionalize", functional_kernel(_alias))


def renumber(graph: fx.Graph, tier: Tier) -> None:
    """Have a graph's ops move values to and from a tier, in place of that of another process."""
    for node in graph.nodes:
        if node.target in MOVES:
            at = [argument.name for argument in node.target._schema.arguments].index("tier")
            node.update_arg(at, tier.number)
