#!/bin/sh
# Build the wheel, install it into a fresh environment as a user would, and run its commands far
# from the checkout: the demo, and those without a server.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python=$1
extras=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf "$root/dist"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "$root/dist" "$root"
sh "$root/scripts/make_venv.sh" "$work/a venv"
"$work/a venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" \
    "$(echo "$root"/dist/*.whl)${extras:+[$extras]}"
cd "$work"
unset PYTHONPATH
command="$work/a venv/bin/mlx-grpc-backend"
"$command" --version
"$command" serve --help >/dev/null
"$command" demo
echo "What is the weather in Oslo?" | "$command" chat demo --weather --temperature 0
