"""Formats whose calls are a name and JSON arguments."""
