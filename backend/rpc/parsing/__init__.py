"""Protobuf messages to the backend's own values."""
