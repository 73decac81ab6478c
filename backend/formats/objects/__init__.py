"""Formats whose calls are JSON objects."""
