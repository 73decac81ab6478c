"""Replies that consist of messages."""
