"""Protobuf messages to the backend's own values.

Every function raises `InvalidRequestError` with the name of the field that it refuses.
"""
