"""Build one model: `python -m benchmarks.build_model DIRECTORY HIDDEN LAYERS VOCAB`."""

import sys
from pathlib import Path

from scripts.tiny_models import build_llama

directory, hidden, layers, vocab = sys.argv[1:]
build_llama(Path(directory), hidden=int(hidden), layers=int(layers), vocab=int(vocab))
