"""One thread that owns MLX, and the interface to it."""
