"""Decodes untrusted image, sound and video files to plain values."""
