"""Raw mlx-lm's load and first token: `python -m benchmarks.harness.raw_load DIRECTORY PROMPT`.

Writes a line as soon as it has the token.
"""

import sys

from mlx_lm import load, stream_generate


def main() -> None:
    """Load a model, and generate one token."""
    directory, prompt = sys.argv[1:]
    network, tokenizer = load(directory)[:2]
    next(iter(stream_generate(network, tokenizer, prompt, max_tokens=2)))
    sys.stdout.write("first token\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
