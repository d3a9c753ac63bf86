"""Plans of steps of several graphs, made without running them."""
