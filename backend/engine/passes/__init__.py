"""Forward passes: prefill and decode."""
