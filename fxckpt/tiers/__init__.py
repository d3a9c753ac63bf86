"""Tiers: places off the device that saved values are sent to, for ``Backend(offload=...)``."""

from contextlib import suppress

from fxckpt.errors import InvalidOption
from fxckpt.tiers.disk import Disk
from fxckpt.tiers.host import Host, Throttled
from fxckpt.tiers.tier import Tier

__all__ = ["ENDLESS", "Disk", "Host", "Throttled", "Tier", "tier_of"]

ENDLESS = "4194304TiB"
"""Limit of a host that holds all that is sent to it: what an address can name."""


def tier_of(offload: object) -> Tier | None:
    """Return the tier that a user asked for; a string is the limit of a host, or ``"host"``.

    Raises :class:`InvalidOption` for what is no tier.

    >>> tier_of("64GiB")
    fxckpt.tiers.Host('64GiB')
    """
    if offload is None:
        return None
    tier = offload
    if isinstance(offload, str):
        with suppress(InvalidOption):
            tier = Host(ENDLESS if offload.strip().lower() == "host" else offload)
    if not isinstance(tier, Tier):
        raise InvalidOption(
            f"offload={offload!r} is not a place to send values to. Allowed: 'host' for as much as "
            "the machine has, a size more than 0 such as '64GiB', or a tier such as "
            "fxckpt.tiers.Host('64GiB') or fxckpt.tiers.Disk(path, '1TiB')."
        )
    return tier
