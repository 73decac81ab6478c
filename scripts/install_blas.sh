#!/bin/sh
# On Linux without an NVIDIA GPU MLX's own BLAS is the slow reference one; run.sh preloads the
# system's OpenBLAS instead. Install one if permitted, else print how.
set -eu
[ "$(uname -s)" = Linux ] || exit 0
command -v nvidia-smi >/dev/null 2>&1 && exit 0
# Not on the PATH of a user without rights on Debian.
PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null | grep -q 'libopenblas\.so\.0' && exit 0
if command -v apt-get >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ]; then
        if (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libopenblas0-pthread) >/dev/null 2>&1; then
            echo "installed OpenBLAS"
            exit 0
        fi
    fi
    echo "for many times the speed on this CPU: sudo apt-get install libopenblas0-pthread"
else
    echo "for many times the speed on this CPU install OpenBLAS (libopenblas.so.0)"
fi
