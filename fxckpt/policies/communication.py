"""Policies about values that come from other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.errors import PolicyMatchesNothing
from fxckpt.ops.properties import COMMUNICATING, is_gather
from fxckpt.policies.base import BoundPolicy, OpenWithoutMatch, Policy, Value

CASTS = ("_to_copy", "convert_element_type")
"""Ops between a sharded parameter and its gather, besides views."""


@dataclass(frozen=True)
class GatherAgain(OpenWithoutMatch):
    """Gathers of the graph's inputs, such as sharded parameters, run again in the backward."""

    @property
    def needs_graph(self) -> bool:
        """True: what a gather reads decides."""
        return True

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Leave the value open: the answers are those of the bound policy."""
        return None

    def bind(self, values: Sequence[Value]) -> Policy:
        """Select the gathers whose argument is an input of the graph, cast at most.

        Raises :class:`~fxckpt.errors.PolicyMatchesNothing` if there is none.
        """
        inputs: set[int] = set()
        answers: list[CheckpointPolicy | None] = []
        for i, value in enumerate(values):
            is_of_input = inputs.issuperset(value.reads)
            if is_of_input and getattr(value.op, "_opname", "") in CASTS:
                inputs.add(i)
            again = is_of_input and is_gather(value.op)
            answers.append(CheckpointPolicy.MUST_RECOMPUTE if again else None)
        if not any(answers):
            raise PolicyMatchesNothing(
                "gather_again finds no gather of a parameter or another input of the graph. "
                "FSDP2 gathers parameters outside of the graph, where no policy is needed."
            )
        return BoundPolicy(self, tuple(answers))

    def __repr__(self) -> str:
        return "gather_again"


@dataclass(frozen=True)
class SaveCollectives(Policy):
    """Saves what comes from other ranks, and leaves the rest open."""

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return MUST_SAVE for the results of collectives."""
        return CheckpointPolicy.MUST_SAVE if is_communicating(value.op) else None

    def __repr__(self) -> str:
        return "save_collectives"


def is_communicating(op: Any) -> bool:
    """Return whether an op communicates with other ranks."""
    return getattr(op, "namespace", "") in COMMUNICATING
