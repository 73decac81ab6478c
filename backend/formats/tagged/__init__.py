"""Formats whose arguments are raw values in tags."""
