"""Functions without knowledge of graphs or plans."""
