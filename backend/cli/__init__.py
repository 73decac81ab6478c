"""What a person types: `python -m backend.cli demo` and `chat`. A client only, without MLX."""
