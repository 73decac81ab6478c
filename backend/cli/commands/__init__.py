"""One module per command: its options, and one-line errors."""
