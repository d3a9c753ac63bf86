"""One budget for a whole step of many graphs."""
