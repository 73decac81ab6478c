"""One reader for each call syntax shared by model families."""
