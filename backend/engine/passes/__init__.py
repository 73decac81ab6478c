"""Forward passes: prefill, decode, and the checks of a model at load."""
