"""The memory of a whole training step, by kind and module."""
