"""Rank 0, the engine process: it takes orders of the server, and leads every turn."""
