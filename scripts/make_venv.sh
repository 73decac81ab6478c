#!/bin/sh
# Make a virtual environment with the newest Python that is here, 3.11 at least.
set -eu
venv=$1

find_python() {
    for name in python3.13 python3.12 python3.11 python3; do
        if command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "Python 3.11 or newer is needed, and none was found" >&2
    exit 1
}

# Debian keeps ensurepip, which venv needs, in a package of its own.
install_venv_module() {
    command -v apt-get >/dev/null 2>&1 || return 1
    if [ "$(id -u)" = 0 ]; then sudo=; elif sudo -n true 2>/dev/null; then sudo=sudo; else return 1; fi
    $sudo apt-get update -qq
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv
}

python=$(find_python)
if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi
if ! "$python" -c 'import ensurepip' 2>/dev/null && ! install_venv_module; then
    echo "this Python cannot make virtual environments; run: sudo apt-get install python3-venv" >&2
    exit 1
fi
"$python" -m venv "$venv"
