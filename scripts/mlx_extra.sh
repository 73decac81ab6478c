#!/bin/sh
# Print the extra of pyproject.toml with the MLX build for this machine.
set -eu
[ "$(uname -s)" = Linux ] || exit 0
if ! command -v nvidia-smi >/dev/null 2>&1; then
    echo cpu
elif nvidia-smi | grep -q 'CUDA Version: 12'; then
    echo cuda12
else
    echo cuda13
fi
