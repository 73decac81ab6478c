"""Drafts of the next tokens of rows, and the choice of how many to feed: policy without MLX."""
