"""Helpers without knowledge of graphs or plans."""
