"""From what a LoadModel asks for to a model, a tokenizer and a chat template."""
