"""One thread that owns MLX, and the way to talk to it."""
