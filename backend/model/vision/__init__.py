"""Towers of vision models, and processors for their media."""
