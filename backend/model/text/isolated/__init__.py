"""Chat templates and long texts in separate processes."""
