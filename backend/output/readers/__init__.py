"""Reads the text of tool calls, as written by a model family, into deltas."""
