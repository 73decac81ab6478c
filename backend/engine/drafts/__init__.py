"""Drafts of the next tokens of rows, and how many of them pay: pure policy, without MLX."""
