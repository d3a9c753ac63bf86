"""Checks of a checkpointed or offloaded step against the same step without."""
