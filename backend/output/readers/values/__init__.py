"""Values of arguments as they are written, to JSON."""
