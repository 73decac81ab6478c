"""Finds small faults in the core that no test would notice."""
