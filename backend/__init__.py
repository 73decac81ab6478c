"""A gRPC model backend for MLX: text and vision models in one continuous batch."""

__version__ = "0.1.0"
