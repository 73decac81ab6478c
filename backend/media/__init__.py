"""Decodes untrusted image, sound and video files to plain values.

A file that is no medium, damaged or too large raises `InvalidRequestError`, and one whose library
is not installed `UnsupportedError`.
"""
