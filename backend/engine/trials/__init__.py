"""Checks of a model at load: its abilities and their costs."""
