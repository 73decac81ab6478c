"""The backends on one machine: the memory and the share of each."""
