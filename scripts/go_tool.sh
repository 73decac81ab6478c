#!/bin/sh
# Install a Go program for our checks, in a fixed version, into build/bin.
# Exit code 1: it is missing and cannot be installed.
set -eu
name=$1
case $name in
grpcurl) module=github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.4 ;;
promtool) module=github.com/prometheus/prometheus/cmd/promtool@v0.316.0 ;;
crane) module=github.com/google/go-containerregistry/cmd/crane@v0.22.1 ;;
*)
    echo "go_tool.sh: no such tool: $name" >&2
    exit 2
    ;;
esac

bin=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)/build/bin
if command -v "$name" >/dev/null 2>&1; then
    echo "$name is $(command -v "$name")"
    exit 0
fi
if [ -x "$bin/$name" ]; then
    echo "$name is in $bin; commands of the docs find it after: export PATH=\"$bin:\$PATH\""
    exit 0
fi
if ! command -v go >/dev/null 2>&1; then
    echo "$name is not here, and there is no Go toolchain to install it with" >&2
    exit 1
fi
mkdir -p "$bin"
if ! GOBIN=$bin go install "$module" >"$bin/$name.log" 2>&1; then
    echo "$name could not be installed: $(tail -n 1 "$bin/$name.log")" >&2
    exit 1
fi
rm -f "$bin/$name.log"
echo "installed $bin/$name; commands of the docs find it after: export PATH=\"$bin:\$PATH\""
