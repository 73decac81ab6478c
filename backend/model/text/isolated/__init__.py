"""Chat templates in a process of their own."""
