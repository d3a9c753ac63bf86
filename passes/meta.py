"""Keys of ``node.meta``, and of a graph module's, that passes leave for one another."""

from __future__ import annotations

UNTRACKED = "fxckpt_untracked"
"""Under ``meta["custom"]``: marks a write that ran with grad mode off."""

CALL = "fxckpt_call"
"""Under ``meta["custom"]``: holds the number of the node's call on the tape."""

HELD = "fxckpt_held"
"""Marks the ops of a call whose results an eager region holds, as it cannot run again."""

HELD_TO = "fxckpt_held_to"
"""Holds the last call during which each result of a call was live, and its bytes, by its path."""

HAS_STATE = "fxckpt_has_state"
"""Marks a random op before which an eager region keeps the generator's state."""

NAME = "fxckpt_name"
"""Holds the user's names of the value of an op or an input, a tuple of strings."""

RECOMPUTE_OF = "fxckpt_recompute_of"
"""Marks a copy in the backward; holds the name of the forward node it repeats."""

IS_RECOMPUTE = "fxckpt_is_recompute"
"""Marks a copy of an op; copies of views and of items of a tuple lack it."""

NEVER_STORED = "fxckpt_never_stored"
"""Marks a copy that the plan has inlined into the fused kernels that read it."""

FIRST_RUN_OF = "fxckpt_first_run_of"
"""Marks the forward's call of a random op that also returns the generator state; holds its name."""

CHECKSUM_OF = "fxckpt_checksum_of"
"""Marks a checksum, or filled memory, that may be saved beside the plan; holds its op's name."""

ORDER = "fxckpt_order"
"""Holds ``(own nodes before it, whether it is a copy)`` of a node of a half."""

LAST_READER = "fxckpt_last_reader"
"""Marks an op that all other readers of its operands run before."""

MODEL = "fxckpt_model"
"""On a graph module: holds the name of the model that it was captured from."""

DEVICE = "fxckpt_device"
"""On a graph module: holds the name of the GPU that it is planned for, where a user named one."""

VIEW_OF = "fxckpt_view_of"
"""Marks a saved view; holds the name of the value it aliases."""

AWAY = "fxckpt_away"
"""Marks a tensor off the device; holds the name of the value that it is a copy of."""

ACCUMULATES = "fxckpt_accumulates"
"""Marks a sum over tiles, which may be written into the sum so far on every device."""
