"""Reads replies made of messages."""
