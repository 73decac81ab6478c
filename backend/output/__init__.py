"""Tokens to deltas: detokenizing, channels, tool calls, stop strings. Pure Python."""
