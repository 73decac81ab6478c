"""Measurements against raw mlx-lm on the same machine in the same run: `python -m benchmarks`."""
