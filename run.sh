#!/bin/sh
# Started by the host: `run.sh --addr HOST:PORT`, from any directory, with any other arguments.
# It becomes the Python process, so that the host's signals and its death reach it.
set -eu

# First, because a host that dies before Python runs would no longer be known.
export MLX_BACKEND_PARENT=$PPID

# Hosts close standard input and output, and a pipe or a socket would take their numbers.
exec </dev/null
(: >&1) 2>/dev/null || exec >/dev/null
(: >&2) || exec 2>/dev/null

# A full disk, or a reader that is gone, is no reason to end.
say() {
    (trap '' PIPE && echo "run.sh: $1" >&2) || :
}

root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
packages=$root

# A package of `make package` contains its Python and all dependencies.
use_package() {
    python=$root/python/bin/python3
    packages=$root:$root/site-packages
    unset PYTHONHOME
    export PYTHONNOUSERSITE=1
    if [ -d "$root/lib" ]; then
        export LD_LIBRARY_PATH="$root/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    fi
}

use_environment() {
    for python in "$root/.venv/bin/python" "$root/venv/bin/python" python3; do
        [ ! -x "$python" ] || return 0
    done
}

if [ -x "$root/python/bin/python3" ]; then use_package; else use_environment; fi

find_openblas() {
    if [ -e "$root/lib/libopenblas.so.0" ]; then
        # By name only: LD_PRELOAD splits paths at spaces.
        echo libopenblas.so.0
        return
    fi
    PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null |
        sed -n 's/.*libopenblas\.so\.0 .*=> //p' | head -n 1
}

# MLX's Linux wheel contains the reference BLAS, thirty times slower on a CPU than OpenBLAS.
# MLX_BACKEND_PRELOAD_BLAS=0 keeps that.
preload_openblas() {
    library=$(find_openblas)
    if [ -z "$library" ]; then
        say "no OpenBLAS found, MLX uses its slow reference BLAS (install libopenblas0)"
        return
    fi
    say "preloading $library in place of MLX's reference BLAS"
    LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}
    # Here it computes nothing; the engine process sets its own number. Idle threads sleep at once.
    OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
    OPENBLAS_THREAD_TIMEOUT=${OPENBLAS_THREAD_TIMEOUT:-4}
    export LD_PRELOAD OPENBLAS_NUM_THREADS OPENBLAS_THREAD_TIMEOUT
}

if [ "$(uname -s)" = Linux ] && [ ! -e /dev/nvidiactl ] && [ "${MLX_BACKEND_PRELOAD_BLAS:-1}" != 0 ]; then
    preload_openblas
fi

export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
# -P keeps the working directory from shadowing our packages.
exec "$python" -P -m backend "$@"
