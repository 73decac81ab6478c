"""One reader per call syntax that model families share."""
