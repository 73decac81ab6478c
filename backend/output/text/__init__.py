"""Text that is still growing: markers in it, code, and whitespace at its ends."""
