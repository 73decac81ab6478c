"""Requests in the engine: scheduling, queueing and memory."""
