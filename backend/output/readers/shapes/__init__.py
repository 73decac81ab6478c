"""Builds the readers' patterns from the dialects of the formats."""
