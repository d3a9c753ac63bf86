"""Schedules of ``torch.distributed.pipelining``: forwards and backwards of one rank in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from fxckpt.errors import InvalidOption

FORWARD, BACKWARDS = "F", ("B", "I")
"""Actions of a schedule's plan: a forward, and the part of a backward that reads what it saved."""


def calls_of(schedule: Any) -> list[tuple[int, int, bool]]:
    """Return the calls of this rank's stages in a step: stage, micro-batch, whether a backward.

    Raises :class:`InvalidOption` for another object, and for a schedule without backwards.
    """
    # Not at the top: not every build of torch has it.
    from torch.distributed.pipelining import schedules

    order: Any
    if isinstance(schedule, schedules.PipelineScheduleMulti):
        order, rank = schedule.pipeline_order, schedule.rank
    elif isinstance(schedule, schedules.PipelineScheduleSingle):
        order, rank = schedule.pipeline_order, schedule._stage.group_rank
    else:
        raise InvalidOption(
            f"schedule={schedule!r} is not a schedule of torch.distributed.pipelining. Example: "
            "backend.follow(ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss))."
        )
    calls = [
        (part.stage_index, part.microbatch_index, part.computation_type.value in BACKWARDS)
        for action in (order or {}).get(rank, ())
        if action is not None
        for part in (action.sub_actions or (action,))
        if part.computation_type.value in (FORWARD, *BACKWARDS)
    ]
    if not schedule._has_backward or not any(is_backward for _, _, is_backward in calls):
        raise InvalidOption(
            f"{type(schedule).__name__} has no backwards, so there is nothing to recompute. Give "
            "it a loss: Schedule1F1B(stage, n_microbatches, loss_fn=loss)."
        )
    return calls


def around_each_step(schedule: Any, begin: Callable[[], object], end: Callable[[], object]) -> None:
    """Call ``begin`` once the stages are ready for a step of a schedule, and ``end`` after it.

    To find the shapes that stages send, the first step runs one micro-batch more before it.
    """
    many, one = "_initialize_stages", "_initialize_stage"
    preparing = many if hasattr(schedule, many) else one
    step, prepare = schedule.step, getattr(schedule, preparing)

    @wraps(step)
    def followed(*args: Any, **kwargs: Any) -> Any:
        outputs = step(*args, **kwargs)
        end()
        return outputs

    @wraps(prepare)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        found = prepare(*args, **kwargs)
        begin()
        return found

    schedule.step = followed
    setattr(schedule, preparing, prepared)
