"""Converts argument values, as written, to JSON."""
