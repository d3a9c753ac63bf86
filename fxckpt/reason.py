"""Decisions about values, and the reasons for them."""

from __future__ import annotations

import enum


class Decision(enum.StrEnum):
    """Fate of a forward value that the backward reads."""

    SAVED = "saved"
    """The forward saves the value for the backward."""
    RECOMPUTED = "recomputed"
    """The backward recomputes the value."""
    OFFLOADED = "offloaded"
    """The forward sends the value away from the device, and the backward fetches it."""


class Reason(enum.StrEnum):
    """Reason why a value is saved or recomputed, or why an op must not be recomputed.

    The text of a member is its ``value``. A reason is recorded with its decision, and quoted by
    reports and errors.
    """

    CHEAPER_TO_SAVE = "cheaper to save than to recompute at this budget"
    CHEAPER_TO_RECOMPUTE = "its bytes cost more than its time at this budget"
    CHEAPER_TO_SEND = "cheaper to send away than to keep or to recompute at this budget"
    FREE = "recomputing it takes no extra time"
    OUTPUT = "a forward output, alive anyway"
    RANDOM_WITHOUT_STATE = "random, and its generator state cannot be captured"
    SMALLER_THAN_STATE = "random, and no larger than the generator state"
    RNG_STATE = "generator state for the replay of a random op"
    MUTATED_INPUT = "reads an input that is written later"
    EFFECT = "its op has effects or is unknown"
    HELD = "an eager region holds it, as its op cannot run again"
    COLLECTIVE = "a collective"
    STREAM = "it runs on a stream of its own, or is read on one"
    DECISION = "it decides (chooses, sorts, counts): its choice is kept"
    REGISTERED = "registered with recompute=False"
    SYMBOLIC = "a size or scalar, no bytes"
    POLICY = "the policy says so"
    REGION = "a checkpoint region in the model says so"
