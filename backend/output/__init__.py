"""Turns tokens into deltas: text, channels, tool calls, stop strings. Pure Python."""
