"""LoRA adapters: found, read in the formats of mlx-lm and PEFT, and put onto a network."""
