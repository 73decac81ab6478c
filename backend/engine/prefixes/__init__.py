"""The engine's side of the prompt cache."""
