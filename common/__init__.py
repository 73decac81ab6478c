"""Process-level helpers for any gRPC model backend; independent of `backend`."""
