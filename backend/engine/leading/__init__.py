"""Rank 0, the engine process: it obeys the server, and leads every turn."""
