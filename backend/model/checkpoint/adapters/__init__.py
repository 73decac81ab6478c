"""LoRA adapters: locates them, reads mlx-lm's and PEFT's formats, applies them to a network."""
