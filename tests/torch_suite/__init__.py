"""Torch's own test files, run with fxckpt in place of parts of torch: ``make torch-tests``."""
