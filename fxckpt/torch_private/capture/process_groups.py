"""Process groups, and the store that their processes share."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def default_store() -> Any:
    """Return the store that ``init_process_group`` made or was given."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def compile_group() -> dist.ProcessGroup | None:
    """Return the group in which torch's compiles decide together; None if they do not.

    ``torch._dynamo.config.enable_compiler_collectives`` asks for it.
    """
    from torch._dynamo.distributed import get_compile_pg

    return get_compile_pg()


def code_in_progress() -> int | None:
    """Return Dynamo's number of the code that it compiles; None outside of a compile."""
    from torch._guards import CompileContext

    found = CompileContext.current_compile_id()
    return None if found is None else found.frame_id
