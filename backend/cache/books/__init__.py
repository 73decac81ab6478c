"""What people are told of the prompt cache; no eviction depends on it."""
