#!/usr/bin/env bash
# Installs the wheels in another Linux: in a root file system that has Python and nothing else, with no network. Needs
# root. The requirements are downloaded first, for the Python of that system.
#
#     debootstrap --variant=minbase --include=python3,python3-venv bookworm /tmp/debian http://deb.debian.org/debian
#     llama_abi/wheels/try_root.sh /tmp/debian [FOLDER]        default: dist
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
system=$(cd "$1" && pwd -P)
wheels=$(cd "${2:-$root/dist}" && pwd -P)
python=${PYTHON:-python3}
[ "$(id -u)" = 0 ] || { echo "try_root.sh needs root, for chroot" >&2; exit 1; }
rm -rf "$system/wheels" "$system/home/newcomer"
mkdir -p "$system/wheels" "$system/home/newcomer"
version=$(chroot "$system" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -m pip download --quiet --disable-pip-version-check --only-binary :all: --python-version "$version" \
  --find-links "$wheels" --dest "$system/wheels" 'uma-trio[llama]'
cat >"$system/home/newcomer/try.sh" <<'END'
set -eu
cd "$HOME"
for program in cc gcc clang cmake git; do
  if command -v "$program" >/dev/null; then echo "$program is installed here" >&2; exit 1; fi
done
. /etc/os-release
echo "$PRETTY_NAME, $(python3 --version), glibc $(ldd --version 2>/dev/null | sed -n '1s/.* //p')"
began=$(date +%s%N)
since() { echo "$((($(date +%s%N) - began) / 1000000)) ms"; }
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check --no-index --find-links /wheels 'uma-trio[llama]'
echo "installed after $(since)"
began=$(date +%s%N)
venv/bin/uma-trio serve --socket "$HOME/s.sock" >serve.log 2>&1 &
until [ -S "$HOME/s.sock" ]; do kill -0 $! || { cat serve.log >&2; exit 1; }; sleep 0.05; done
echo "serves after $(since)"
venv/bin/uma-trio ask --socket "$HOME/s.sock" "What is the capital of France?" | tee answer
echo "first answer after $(since)"
grep -q Paris answer
venv/bin/uma-trio doctor --socket "$HOME/s.sock" | grep -E ' (stamp|plug-ins|library) '
kill $! && wait $! || true
END
unshare --mount --pid --fork --net sh -ec "
  mount -t proc proc '$system/proc'
  mount --rbind /dev '$system/dev'
  ip link set lo up 2>/dev/null || true
  exec chroot '$system' env -i HOME=/home/newcomer PATH=/usr/bin:/bin LANG=C.UTF-8 sh /home/newcomer/try.sh"
