"""Formats that frame the whole reply."""
