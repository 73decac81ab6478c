#!/bin/sh
# What the host starts: `run.sh --addr HOST:PORT`, from any directory, with any other arguments.
# It becomes the Python process, so that the host's signals and its death reach it.
set -eu

# Hosts close standard input, and a pipe would take its number.
exec </dev/null

root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

python=python3
for candidate in "$root/.venv/bin/python" "$root/venv/bin/python"; do
    if [ -x "$candidate" ]; then
        python=$candidate
        break
    fi
done

# MLX's Linux wheel brings the reference BLAS, thirty times slower on a CPU than OpenBLAS.
# MLX_BACKEND_PRELOAD_BLAS=0 leaves it at that.
preload_openblas() {
    library=$(PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null |
        sed -n 's/.*libopenblas\.so\.0 .*=> //p' | head -n 1)
    if [ -z "$library" ]; then
        echo "run.sh: no OpenBLAS found, MLX uses its slow reference BLAS (install libopenblas0)" >&2
        return
    fi
    echo "run.sh: preloading $library in place of MLX's reference BLAS" >&2
    LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}
    # Measured best for decoding; threads of its own would fight MLX's.
    OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
    export LD_PRELOAD OPENBLAS_NUM_THREADS
}

if [ "$(uname -s)" = Linux ] && [ ! -e /dev/nvidiactl ] && [ "${MLX_BACKEND_PRELOAD_BLAS:-1}" != 0 ]; then
    preload_openblas
fi

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# -P keeps the working directory from shadowing our packages.
exec "$python" -P -m backend "$@"
