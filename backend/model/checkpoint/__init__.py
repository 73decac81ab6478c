"""Locates, fetches, reads and checks the files of a checkpoint.

What is refused raises `LoadError`, or `UnsupportedModelError` for another kind of model; the
message names the file, the field or the option.
"""
