"""The command line, `mlx-grpc-backend chat` and others: clients, without MLX."""
