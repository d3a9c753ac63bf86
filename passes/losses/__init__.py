"""Losses: what a loss holds, and the gradient of cross entropy in one op."""
