"""Computing fast on a CPU; `install` is the only way in."""
