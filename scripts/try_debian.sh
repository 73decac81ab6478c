#!/bin/sh
# Try this checkout as a new user would on a bare Debian: `sh scripts/try_debian.sh trixie DIRECTORY`.
# Needs root and debootstrap. Debian is installed in DIRECTORY and kept, so that a second run is faster.
# A grpcurl in its /usr/local/bin makes the calls of the docs.
# A user without rights tries first and must be told how to go on; then root does, then the user again.
set -eu
release=$1
root=$2
here=$(cd "$(dirname "$0")/.." && pwd)
certificates=/etc/ssl/certs/ca-certificates.crt

say() { printf '\n== %s\n' "$*"; }

inside() {
    user=$1
    home=$2
    shift 2
    chroot --userspec="$user:$user" "$root" /usr/bin/env -i HOME="$home" TERM=dumb LANG=C.UTF-8 \
        PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PIP_CERT=$certificates SSL_CERT_FILE=$certificates \
        /bin/sh -ec "$*"
}

# Seconds, then user and system time of the shell and of its children: a busy machine does not stretch those much.
timed() { echo "began=\$(date +%s); $*; echo took \$((\$(date +%s) - began)) s; times"; }

as_root() { inside root /srv/root "$*"; }
as_user() { inside someone /srv/someone "cd '/srv/someone/my checkout'; $*"; }

install_debian() {
    [ -e "$root/etc/debian_version" ] ||
        debootstrap --variant=minbase --include=ca-certificates "$release" "$root" >/dev/null
    # The packages come through the network of this machine.
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    cp $certificates "$root$certificates"
    mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
    trap 'umount "$root/proc"' EXIT
    as_root 'apt-get update -qq'
    as_root 'DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends git make python3 >/dev/null'
    as_root 'mkdir -p /srv/root; id someone >/dev/null 2>&1 || useradd --create-home --home-dir /srv/someone someone'
}

copy_checkout() {
    rm -rf "$root/srv/root/my checkout" "$root/srv/someone/my checkout"
    git clone -q "$here" "$root/srv/root/my checkout"
    cp -r "$root/srv/root/my checkout" "$root/srv/someone/my checkout"
    as_root "chown -R someone:someone '/srv/someone/my checkout'"
}

try_without_venv() {
    as_root "apt-get purge -y -qq 'python3*-venv' python3-pip-whl >/dev/null 2>&1 || true"
    if as_user 'make demo' >"$root/tmp/hint" 2>&1; then
        echo "make demo went on without python3-venv" >&2
        exit 1
    fi
    grep 'apt-get install python3-venv' "$root/tmp/hint"
}

try_commands() {
    as_user '.venv/bin/mlx-grpc-backend doctor || true'
    as_user '.venv/bin/mlx-grpc-backend fit backend/demo/model'
    as_user '
        ./run.sh --addr 127.0.0.1:50977 --dashboard 127.0.0.1:50978 2>server.log &
        server=$!
        trap "kill $server" EXIT
        for second in $(seq 60); do
            .venv/bin/mlx-grpc-backend status --once --addr 127.0.0.1:50977 >/dev/null 2>&1 && break
            sleep 1
        done
        echo "What is the weather in Oslo?" | .venv/bin/mlx-grpc-backend chat --addr 127.0.0.1:50977 --model "$PWD/backend/demo/model" --weather --temperature 0
        .venv/bin/mlx-grpc-backend status --once --addr 127.0.0.1:50977
        .venv/bin/mlx-grpc-backend cache --addr 127.0.0.1:50977
        .venv/bin/python -c "import urllib.request as r; print(len(r.urlopen(\"http://127.0.0.1:50978/\").read()), \"bytes of the page\")"
    '
}

say "Debian $release"
install_debian
copy_checkout
say "a user without python3-venv is told how to go on"
try_without_venv
say "root: make demo"
as_root "cd '/srv/root/my checkout'; make demo"
say "a user: make demo"
as_user "$(timed make demo)"
say "a user: make demo with uv"
as_root 'python3 -m venv /opt/uv; /opt/uv/bin/pip install -q uv; ln -sf /opt/uv/bin/uv /usr/local/bin/uv'
as_user "rm -rf .venv; $(timed make demo)"
as_root 'rm /usr/local/bin/uv'
say "a user: the commands of the README"
try_commands
say "a user: make wheel"
as_user 'make wheel'
say "every call of the docs, and the tests of the command line"
as_user "sh scripts/go_tool.sh grpcurl || echo 'going on without grpcurl'"
as_user "make test PYTEST_FLAGS='tests/test_debugging_page.py tests/cli tests/test_packaging.py'"
say "done"
