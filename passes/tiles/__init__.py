"""Tiles: regions of independent rows, and their unrolling."""
