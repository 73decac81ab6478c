#!/bin/sh
# Install packages into a virtual environment: `sh scripts/install_packages.sh PYTHON ARGUMENT...`, with
# pip's arguments. With uv where there is one, several times as fast as pip. A terminal sees the progress.
set -eu
python=$1
shift
if [ -t 2 ]; then quiet=; else quiet=--quiet; fi
if command -v uv >/dev/null 2>&1; then
    # shellcheck disable=SC2086 # an empty word is none
    uv pip install $quiet --python "$python" "$@" && exit 0
    echo "uv could not install the packages; trying pip, which may know another index" >&2
fi
# Modules are compiled when they are first imported: all at once takes longer than the download.
# shellcheck disable=SC2086
exec "$python" -m pip install $quiet --disable-pip-version-check --no-compile "$@"
