#!/usr/bin/env bash
# Installs the wheels of a folder as a newcomer does, without a compiler, cmake or git on the PATH, and asks the daemon a
# question. Makes the wheel of uma-trio itself first, if the folder has none. Needs a package index for the other
# requirements.
#
#     llama_abi/wheels/try.sh [FOLDER]        default: dist
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
wheels=$(cd "${1:-$root/dist}" && pwd -P)
python=$(command -v "${PYTHON:-python3}")
home=$(mktemp -d)
server=
finish() {
  if [ -n "$server" ]; then kill "$server" 2>/dev/null && wait "$server" || true; fi
  rm -rf "$home"
}
trap finish EXIT

# The wheels of this version, and not a newer one of the index or an older one that was left in the folder.
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$root/uma_trio/__init__.py")
if ! ls "$wheels/uma_trio-$version"-*.whl >/dev/null 2>&1; then
  "$python" -m hatchling build --help >/dev/null || { echo "try.sh needs hatchling: pip install hatchling" >&2; exit 1; }
  (cd "$root" && "$python" -m hatchling build -t wheel -d "$wheels")
fi

# Only these programs are on the newcomer's PATH, and of the environment only what pip needs to reach an index.
mkdir "$home/bin"
for program in sh env cat mkdir rm ls uname id kill sleep; do ln -s "$(command -v $program)" "$home/bin/"; done
ln -s "$(readlink -f "$python")" "$home/bin/python3"
index=()
while IFS='=' read -r name _; do index+=("$name=${!name}"); done < <(env | grep -E '^(PIP_|UV_|SSL_CERT|REQUESTS_CA|CURL_CA|https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY)[A-Za-z_]*=' || true)
newcomer=(env -i HOME="$home" PATH="$home/venv/bin:$home/.local/bin:$home/bin" LANG=C.UTF-8 TERM=dumb "${index[@]}")
for program in cc gcc clang cmake git; do
  if "${newcomer[@]}" sh -c "command -v $program" >/dev/null; then echo "$program is on the PATH" >&2; exit 1; fi
done

now() { "$python" -c 'import time; print(time.time())'; }  # the date of macOS knows no fractions of a second
since() { awk -v from="$1" -v to="$(now)" 'BEGIN { printf "%.1f", to - from }'; }

# answer HOW: starts the daemon and asks it.
answer() {
  local began found
  began=$(now)
  "${newcomer[@]}" uma-trio serve --socket "$home/s.sock" >"$home/serve.log" 2>&1 &
  server=$!
  until [ -S "$home/s.sock" ]; do
    kill -0 $server 2>/dev/null || { cat "$home/serve.log" >&2; exit 1; }
    sleep 0.05
  done
  printf '%s: serves after %s s' "$1" "$(since "$began")"
  found=$("${newcomer[@]}" uma-trio ask --socket "$home/s.sock" "What is the capital of France?")
  printf ', first answer after %s s: %s\n' "$(since "$began")" "$found"
  case $found in *Paris*) ;; *) echo "that is not the answer" >&2; exit 1 ;; esac
  kill $server && wait $server || true
  server=
}

cd "$home"
began=$(now)
"${newcomer[@]}" python3 -m venv "$home/venv"
"${newcomer[@]}" pip install --quiet --disable-pip-version-check --find-links "$wheels" "uma-trio[llama]==$version"
echo "pip install: $(since "$began") s"
answer pip
"${newcomer[@]}" uma-trio doctor | grep -E '^(ok|warning|problem) +(stamp|plug-ins|library) '

if uv=$(command -v uv); then
  rm -rf "$home/venv"
  ln -s "$(readlink -f "$uv")" "$home/bin/uv"
  began=$(now)
  "${newcomer[@]}" uv --quiet tool install --find-links "$wheels" --python python3 "uma-trio[llama]==$version"
  echo "uv tool install: $(since "$began") s"
  answer uv
fi
