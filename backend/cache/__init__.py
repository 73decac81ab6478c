"""The prompt cache: KV of prompt prefixes, stored once and found by their tokens."""
