"""Checks of the machine, with a fix for each problem."""
