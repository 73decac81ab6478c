"""Locates, fetches, reads and checks the files of a checkpoint.

A refused file, field or option raises `LoadError`, or `UnsupportedModelError` for another kind of
model; the message names it.
"""
