"""Towers of vision models and the processors of their media."""
