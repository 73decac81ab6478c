"""One module per command: its options, and its errors in one line."""
