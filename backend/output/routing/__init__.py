"""Split a reply into content, thought and tool calls."""
