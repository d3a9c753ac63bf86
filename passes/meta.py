"""Keys of ``node.meta`` that passes leave for one another."""

from __future__ import annotations

UNTRACKED = "fxckpt_untracked"
"""Under ``meta["custom"]``: this writes, and grad mode was off."""

CALL = "fxckpt_call"
"""Under ``meta["custom"]``: the number of the call on the tape that a node is."""

NAME = "fxckpt_name"
"""Metadata of an op or an input: what the user calls its value, a tuple of texts."""

RECOMPUTE_OF = "fxckpt_recompute_of"
"""Metadata of a copy in the backward: the name of the forward node it repeats."""

RUNS_AGAIN = "fxckpt_runs_again"
"""Metadata of a copy that does work, not of a view."""

NEVER_STORED = "fxckpt_never_stored"
"""Metadata of a node in the backward that was planned to be no more than a part of the loops that read it."""

FIRST_RUN_OF = "fxckpt_first_run_of"
"""Metadata of the run that gives out its generator state: the name of the op."""

DIGEST_OF = "fxckpt_digest_of"
"""Metadata of what :mod:`~fxckpt.passes.transforms.recompute_checks` adds to a forward and may be saved beside the plan: the name of the op that it is of."""

ORDER = "fxckpt_order"
"""Metadata of a node of the backward: ``(own nodes before it, whether it runs something again)``."""

SHOWS = "fxckpt_shows"
"""Metadata of a saved view: the name of the value that it shows."""
