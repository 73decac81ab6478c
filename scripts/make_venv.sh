#!/bin/sh
# Create a virtual environment: with uv if it is installed, else with the newest installed Python, 3.11 at
# least.
set -eu
venv=$1

has_pip() {
    [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

find_python() {
    for name in python3.14 python3.13 python3.12 python3.11 python3; do
        if command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
}

# Debian has ensurepip, which venv needs, in a separate package.
install_venv_module() {
    command -v apt-get >/dev/null 2>&1 || return 1
    if [ "$(id -u)" = 0 ]; then sudo=; elif sudo -n true 2>/dev/null; then sudo=sudo; else return 1; fi
    $sudo apt-get update -qq
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv
}

make_with_uv() {
    command -v uv >/dev/null 2>&1 && uv venv --quiet --clear --seed --python "${python:->=3.11}" "$venv"
}

if has_pip; then exit 0; fi
python=$(find_python)
if make_with_uv; then
    :
elif [ -n "$python" ] && "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$venv"
elif [ -n "$python" ] && install_venv_module; then
    "$python" -m venv "$venv"
else
    if [ -n "$python" ]; then
        echo "this Python cannot make virtual environments. Do one of these, then run make again:" >&2
        echo "  sudo apt-get install python3-venv" >&2
    else
        echo "Python 3.11 or newer is needed, and none was found. Do one of these, then run make again:" >&2
        echo "  install Python 3.11 or newer" >&2
    fi
    echo "  install uv, which brings a Python of its own: https://docs.astral.sh/uv/" >&2
    exit 1
fi
