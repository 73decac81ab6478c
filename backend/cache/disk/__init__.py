"""The prompt cache's disk tier."""
