"""A checkpoint's files: found, fetched, read, refused."""
