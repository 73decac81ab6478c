"""The commands that a person types, `mlx-grpc-backend chat` and others: clients, without MLX."""
