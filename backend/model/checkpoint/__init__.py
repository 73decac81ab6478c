"""Locates, fetches, reads and checks the files of a checkpoint."""
