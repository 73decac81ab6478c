"""Finds out which small faults in the core no test would notice."""
