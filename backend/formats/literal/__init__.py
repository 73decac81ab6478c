"""Formats whose calls look like a programming language."""
