"""The memory of a whole training step, by what it is for and by module."""
