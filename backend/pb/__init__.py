"""Stubs generated from `backend.proto` by the build hook; only this file is committed."""
