"""Calls of any gRPC service: who makes them, and how they end."""
