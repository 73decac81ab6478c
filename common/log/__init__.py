"""Logging that never blocks, however frequent and unread."""
