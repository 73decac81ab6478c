"""Splits a reply into content, thoughts and tool calls."""
