#!/usr/bin/env bash
# Builds the pinned llama.cpp as a shared library, installs the Python package into the active environment, and checks
# that the two match. See --help. Works with bash 3.2 (macOS) and newer.
set -euo pipefail

usage() {
  cat <<'END'
usage: ./build_llama.sh [options]

Builds libllama and libmtmd from the pinned llama.cpp source, installs this package (editable) into the active Python
environment (or into .venv, if the operating system manages Python), checks the package's declarations against
llama.h with the C compiler, and stamps the library. Requires Python 3.11 or newer and a C++ compiler; downloads
everything else with pip. A second run skips the steps that are up to date; one that is started meanwhile waits.

  --backend NAME   auto (default), cpu, metal, vulkan, cuda or hip (ROCm, never tested). auto selects Metal on Apple
                   Silicon. On Linux it selects CUDA or ROCm if driver and toolkit are installed, Vulkan if its
                   headers, glslc and a loader are installed, and the CPU otherwise
  --cuda-arch LIST build for these CUDA architectures, such as 90 or "80;89" (default: the GPUs of this machine)
  --dev            also install the requirements of tests, benches and notebooks
  --portable       build for all machines of this system and architecture, as the wheels have it: several variants of
                   the CPU code, of which the best is chosen at run time, in build/portable. On Linux with Zig's
                   compiler, which pip downloads, for glibc 2.28 or newer. With --backend vulkan or cuda, build only
                   that backend, as a plug-in for such a library, in build/portable-NAME; for CUDA with this machine's
                   compiler and, without --cuda-arch, for all architectures
  --peers          also build llama-server, llama-batched-bench and llama-bench, which benches/ compares with,
                   from the same source with the same flags, in build/peers/bin
  --prefix DIR     install the library in DIR (default: llama_abi/lib, where the package finds it; for another
                   directory set UMA_LLAMA_DIR=DIR at run time)
  --jobs N         run N compilers in parallel (default: one per CPU, fewer if memory is short)
  --source DIR     build this llama.cpp checkout instead of the pinned source
  --library-only   build the library and install no Python package: for an environment that has the requirements
                   (attrs at least). With --source, cmake and ninja, it needs no network
  --clean          rebuild everything, except for the downloaded archive
  --help           show this text

Environment variables: PYTHON (interpreter), CC and CXX, CMAKE_ARGS (further options for cmake), CUDA_HOME and
ROCM_PATH (directories of the toolkits), VULKAN_SDK (directory with include/, lib/ and bin/ that is searched first),
and those of pip.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
need_mib=400
work=$root/build
logs=$work/log
pin=$(cut -d' ' -f1 "$root/llama_abi/pin.txt")        # name==version
pin_sha256=$(sed 's/.*sha256://' "$root/llama_abi/pin.txt")
archive=$work/download/llama_cpp_python-${pin#*==}.tar.gz
started=$SECONDS
ticker=''

# ── messages ───────────────────────────────────────────────────────────────────────────────────

say() { printf '==> %s\n' "$*"; }

# Fails with one sentence that includes the remedy. The optional second argument is a log file.
die() {
  stop_ticker
  printf 'error: %s\n' "$1" >&2
  if [ $# -gt 1 ]; then printf '       See %s for the full output\n' "$2" >&2; fi
  exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

stop_ticker() {
  if [ -n "$ticker" ]; then
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    ticker=''
    printf '\r\033[K'
  fi
}
trap stop_ticker EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# quietly LOG COMMAND...: runs COMMAND with its output in LOG, and shows the elapsed seconds on a terminal.
quietly() {
  local log=$1 status=0
  shift
  mkdir -p "$logs" 2>/dev/null || no_room "$work"
  if [ -t 1 ]; then
    (n=0; while :; do printf '\r    %ss' "$n"; sleep 1; n=$((n + 1)); done) &
    ticker=$!
  fi
  "$@" >"$log" 2>&1 || status=$?
  stop_ticker
  return $status
}

# ── errors ───────────────────────────────────────────────────────────────────────────

free_mib() { df -Pk "$1" 2>/dev/null | awk 'NR == 2 { print int($4 / 1024) }'; }

no_room() { die "cannot write to $1 ($(free_mib "$(dirname "$1")") MiB free, about $need_mib MiB needed): free some space, or make it writable"; }

need_room() {
  local free
  free=$(free_mib "$1")
  if [ -n "$free" ] && [ "$free" -lt "$2" ]; then
    die "not enough disk space: $1 has $free MiB free, and this build needs about $2 MiB; free some space and run this script again"
  fi
}

# Explains a failed step: a known cause in one sentence, or the last line of the log. The optional third argument is what
# helps without a network.
explain() {
  local what=$1 log=$2 offline=${3:+, or $3} last
  last=$(grep -A1 'CMake Error' "$log" 2>/dev/null | sed -n '2s/^ *//p' || true)
  if [ -z "$last" ]; then last=$(grep -v '^[[:space:]]*$' "$log" 2>/dev/null | tail -n 1 || true); fi
  if grep -Eqi 'no space left on device|disk quota exceeded|Errno 28' "$log" 2>/dev/null; then
    die "the disk is full ($(free_mib "$work") MiB free in $work): free about $need_mib MiB and run this script again"
  fi
  if [ "$(free_mib "$work")" = 0 ]; then no_room "$work"; fi
  if grep -q 'externally-managed-environment' "$log"; then managed; fi
  if grep -Eq 'DO NOT MATCH THE HASHES|Expected sha256' "$log"; then
    die "the downloaded $pin does not have the pinned SHA-256: your package index or proxy serves a changed file; use another index" "$log"
  fi
  if grep -Eqi 'Failed to establish|NewConnectionError|Name or service not known|name resolution|Network is unreachable|Connection refused|timed out|ProxyError|SSLError|Could not find a version|No matching distribution' "$log"; then
    die "$what failed because pip found no package index that has it ($(grep -Em1 'No matching distribution|Could not find a version|Connection|resolution' "$log" | sed 's/^ *\(ERROR: \)*//' | cut -c1-120)): connect to the network, unset PIP_NO_INDEX, or set PIP_INDEX_URL to a mirror$offline" "$log"
  fi
  if grep -qi 'permission denied' "$log"; then
    die "$what failed because a directory is not writable: use a virtual environment (python3 -m venv .venv && . .venv/bin/activate)" "$log"
  fi
  die "$what failed: $last" "$log"
}

# The known causes for which cmake cannot set up a CUDA build; returns if it is none of them.
explain_cuda() {
  local log=$1 otherwise="or use --backend vulkan or cpu"
  if grep -q 'no GPU was detected' "$log"; then
    die "no NVIDIA GPU found to build for: name its architecture, as in --cuda-arch 90, $otherwise" "$log"
  fi
  if grep -q 'Unsupported gpu architecture' "$log"; then
    die "$nvcc cannot build for the architecture ${cuda_arch:-of this GPU}: name one with --cuda-arch ($nvcc --list-gpu-arch lists them), or install another version of the CUDA toolkit" "$log"
  fi
  if grep -Eqi 'unsupported (GNU|clang) version' "$log"; then
    die "the CUDA toolkit does not support $($cxx --version 2>/dev/null | head -n 1): set CUDAHOSTCXX to an older compiler, as in CUDAHOSTCXX=g++-12, install a newer toolkit, $otherwise" "$log"
  fi
  if grep -Eq 'Unable to find cublas|CUDA::cublas' "$log"; then
    die "the CUDA toolkit has no cuBLAS: install the whole toolkit (Debian, Ubuntu: apt install libcublas-dev of the same version), $otherwise" "$log"
  fi
  if grep -q 'CUDA::cuda_driver' "$log"; then
    die "the CUDA toolkit of $nvcc has no libcuda.so to link with (lib64/stubs): install the whole toolkit (Debian, Ubuntu: apt install cuda-driver-dev of the same version), set CMAKE_ARGS=-DGGML_CUDA_NO_VMM=ON, which does without, $otherwise" "$log"
  fi
  if grep -Eq 'Could NOT find CUDAToolkit|CUDA Toolkit not found|cannot find -lcudart_static' "$log"; then
    die "the CUDA toolkit of $nvcc is not complete, as those of Python packages are: install the whole toolkit and set CUDA_HOME to it, $otherwise" "$log"
  fi
  if grep -q 'CUDA compiler' "$log" && grep -Eq 'is not able to compile a simple test program|broken' "$log"; then
    die "the CUDA compiler $nvcc does not work: install the whole CUDA toolkit, $otherwise" "$log"
  fi
}

managed() {
  die "the operating system manages this Python, and pip must not install into it: run  python3 -m venv .venv && . .venv/bin/activate  and then this script again"
}

# ── options ───────────────────────────────────────────────────────────────────────────────────

backend=auto prefix='' source='' jobs='' extra='' clean='' peers='' cuda_arch='' library_only='' portable=''

while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --dev) extra=dev ;;
    --clean) clean=yes ;;
    --peers) peers=yes ;;
    --portable) portable=-portable ;;
    --library-only) library_only=yes ;;
    --backend=* | --cuda-arch=* | --prefix=* | --jobs=* | --source=*) set -- "${1%%=*}" "${1#*=}" "${@:2}"; continue ;;
    --backend | --cuda-arch | --prefix | --jobs | --source)
      if [ $# -lt 2 ] || [ -z "$2" ]; then die "$1 needs a value; see --help"; fi
      case $1 in
        --backend) backend=$2 ;;
        --cuda-arch) cuda_arch=$2 ;;
        --prefix) prefix=$2 ;;
        --jobs) jobs=$2 ;;
        --source) source=$2 ;;
      esac
      shift ;;
    *) die "unknown option $1; see --help" ;;
  esac
  shift
done

case $backend in auto | cpu | metal | vulkan | cuda | hip) ;; *) die "unknown backend '$backend': use auto, cpu, metal, vulkan, cuda or hip" ;; esac
case $jobs in '') ;; 0* | *[!0-9]*) die "--jobs must be a number from 1, not '$jobs'" ;; esac
case $cuda_arch in *[!0-9a-z\;-]*) die "--cuda-arch must be a list such as 90 or '80;89', not '$cuda_arch'" ;; esac
if [ -n "$portable" ] && [ "$backend" = auto ] && [ "$(uname)" != Darwin ]; then backend=cpu; fi
plugin=''                              # the backend, if only a plug-in is built
case $portable$backend in
  -portablecuda | -portablevulkan) plugin=$backend; [ -z "$peers" ] || die "--peers need a whole library: leave out --portable" ;;
  -portablehip) die "--portable is for the CPU, Metal, Vulkan and CUDA: leave out --backend hip" ;;
esac
case $prefix in
  '') if [ -n "$portable" ]; then prefix=$work/portable${plugin:+-$plugin}; else prefix=$root/llama_abi/lib; fi ;;
  /*) ;;
  *) prefix=$PWD/$prefix ;;
esac
# Without "." and "..", and without "/" at its end: the folder next to it is named after it.
left=${prefix#/}/ prefix=''
while [ -n "$left" ]; do
  case ${left%%/*} in '' | .) ;; ..) prefix=${prefix%/*} ;; *) prefix=$prefix/${left%%/*} ;; esac
  left=${left#*/}
done
[ -n "$prefix" ] || die "--prefix / is no folder for a library: choose another --prefix"
if [ -n "$source" ]; then
  [ -f "$source/include/llama.h" ] || die "--source $source is not a llama.cpp checkout: it has no include/llama.h"
  source=$(cd "$source" && pwd -P)
fi

# ── Python ────────────────────────────────────────────────────────────────────────────────────

if [ -n "${PYTHON:-}" ]; then python=$PYTHON
elif [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then python=$VIRTUAL_ENV/bin/python
elif have python3; then python=python3
else python=python
fi
have "$python" || die "no Python found: install Python 3.11 or newer (Debian: apt install python3 python3-venv; macOS: brew install python)"

# Prints one line each: the version; whether it is new enough; whether pip can install; whether the package is installed
# from this directory with the present pyproject.toml and extras; the scripts directory; an id of the environment; a
# digest of pyproject.toml.
probe() {
  "$python" - "$root" "$work" "$extra" <<'PY'
import hashlib, os, sys, sysconfig
root, work, extra = sys.argv[1:]
print(".".join(map(str, sys.version_info[:3])))
print("new" if sys.version_info >= (3, 11) else "old")
try:
    import pip
    pip = "pip"
except ImportError:
    pip = "no-pip"
marker = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
allowed = sys.prefix != sys.base_prefix or os.environ.get("PIP_BREAK_SYSTEM_PACKAGES", "0") not in ("", "0")
print("managed" if os.path.exists(marker) and not allowed else pip)
environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]
with open(os.path.join(root, "pyproject.toml"), "rb") as file:
    wanted = hashlib.sha256(file.read()).hexdigest()
state = "absent"
try:
    import importlib.metadata, json, urllib.parse
    url = json.loads(importlib.metadata.distribution("uma-trio").read_text("direct_url.json") or "{}")
    here = urllib.parse.unquote(urllib.parse.urlparse(url.get("url", "")).path)
    if url.get("dir_info", {}).get("editable") and os.path.realpath(here) == os.path.realpath(root):
        with open(os.path.join(work, "installed", environment)) as file:
            done, extras = file.read().split("\n")[:2]
        if done == wanted and extra in ("", extras):
            state = "installed"
except Exception:
    pass
print(state)
print(sysconfig.get_path("scripts"))
print(environment)
print(wanted)
PY
}

found=$(probe) || die "$python does not start: install Python 3.11 or newer, or set PYTHON to one"

# Builds of one checkout take turns. Python locks, because macOS has no program flock. The lock is that of descriptor 9,
# so it lasts until this script and all that it has started end. A file system without locks is used without one.
try_lock() {
  "$python" -c 'import fcntl, sys
try: fcntl.flock(9, fcntl.LOCK_EX | (fcntl.LOCK_NB if sys.argv[1] == "now" else 0))
except BlockingIOError: sys.exit(1)
except OSError: pass' "$1" >/dev/null 2>&1
}
if { mkdir -p "$work" && exec 9>>"$work/lock"; } 2>/dev/null && ! try_lock now; then
  say "Another ./build_llama.sh runs in $root: waiting until it ends"
  try_lock later
fi

# Where the operating system manages Python, the package goes into an environment of its own.
if [ "$(printf '%s\n' "$found" | sed -n '2p;3p')" = "new
managed" ] && [ -z "$library_only" ]; then
  if ! [ -x "$root/.venv/bin/python" ]; then
    printf '==> The operating system manages %s: making the virtual environment .venv\n' "$python"
    mkdir -p "$logs" 2>/dev/null || no_room "$work"
    "$python" -m venv "$root/.venv" >"$logs/venv.log" 2>&1 || die "$python cannot make a virtual environment: install its module venv (Debian, Ubuntu: apt install python3-venv)" "$logs/venv.log"
  fi
  python=$root/.venv/bin/python
  found=$(probe) || die "$python does not start: remove $root/.venv and run this script again"
fi
version=$(printf '%s\n' "$found" | sed -n 1p)
newness=$(printf '%s\n' "$found" | sed -n 2p)
pip_state=$(printf '%s\n' "$found" | sed -n 3p)
installed=$(printf '%s\n' "$found" | sed -n 4p)
scripts=$(printf '%s\n' "$found" | sed -n 5p)
environment=$(printf '%s\n' "$found" | sed -n 6p)
pyproject=$(printf '%s\n' "$found" | sed -n 7p)

if [ "$newness" = old ]; then
  for newer in python3.14 python3.13 python3.12 python3.11; do
    if have "$newer"; then
      die "Python 3.11 or newer is required and $python is $version, but $newer is installed: run  $newer -m venv .venv && . .venv/bin/activate  and then this script again"
    fi
  done
  die "Python 3.11 or newer is required, and $python is $version: install a newer one, or set PYTHON to one"
fi
if [ -n "$library_only" ]; then
  if [ -n "$extra" ]; then die "--library-only installs nothing, and --dev installs requirements: leave one of them out"; fi
  installed=installed
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
  "$python" -c 'import attrs' 2>/dev/null || die "$python has no package attrs, which the check of the library needs: install it, set PYTHON to another interpreter, or leave out --library-only"
fi
[ "$pip_state" != no-pip ] || [ -n "$library_only" ] || die "$python has no pip: run  $python -m ensurepip  (Debian: apt install python3-pip python3-venv), then this script again"

install_package() {
  local what=.
  if [ -n "$extra" ]; then what=".[$extra]"; fi
  say "Installing the package${extra:+ with the requirements of tests and notebooks} into $(dirname "$scripts")"
  need_room "$root" 50
  quietly "$logs/install.log" in_root "$python" -m pip install --disable-pip-version-check -e "$what" || explain "Installing the package" "$logs/install.log" "install its requirements in another way and add --library-only"
  mkdir -p "$work/installed" || no_room "$work"
  printf '%s\n%s\n' "$pyproject" "$extra" >"$work/installed/$environment" || no_room "$work"
}
# shellcheck disable=SC2317  # called by "quietly"
in_root() { cd "$root" && "$@"; }

# ── backend ───────────────────────────────────────────────────────────────────────────────────

cc=${CC:-cc}
cxx=${CXX:-c++}
need_compiler() {
  if [ "$(uname)" = Darwin ] && ! xcode-select -p >/dev/null 2>&1; then
    die "no C++ compiler found: run  xcode-select --install  and then this script again"
  fi
  if ! have "${cc%% *}"; then
    if have gcc; then cc=gcc; elif have clang; then cc=clang; else no_compiler; fi
  fi
  if ! have "${cxx%% *}"; then
    if have g++; then cxx=g++; elif have clang++; then cxx=clang++; else no_compiler; fi
  fi
}
# Refuses a compiler that would fail after minutes, with an error about a header.
check_compiler() {
  $cxx -std=c++17 -x c++ -c - -o "$logs/compiler.o" >"$logs/compiler.log" 2>&1 <<'END' ||
#include <charconv>
#include <filesystem>
#include <optional>
std::optional<std::filesystem::path> found;
END
    die "the C++ compiler $cxx cannot compile C++17, which llama.cpp needs: install GCC 9, Clang 9 or newer, and set CC and CXX to it if it is not the default" "$logs/compiler.log"
}
no_compiler() { die "no C++ compiler found: install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install), or set CC and CXX"; }

vulkan_problem='' vulkan_library='' vulkan_version=''

# Sets vulkan_problem to the missing requirement and its remedy; empty if Vulkan can be built.
check_vulkan() {
  local answer include=-DUMA
  if [ -n "${VULKAN_SDK:-}" ]; then include="-I$VULKAN_SDK/include"; fi
  answer=$(printf '%s\n' '#if !__has_include(<vulkan/vulkan.hpp>)' 'uma no-headers' '#else' '#include <vulkan/vulkan_core.h>' \
    'uma VK_HEADER_VERSION_COMPLETE' '#ifndef VK_EXT_layer_settings' 'uma too-old' '#elif !__has_include(<spirv/unified1/spirv.hpp>)' \
    'uma no-spirv' '#else' 'uma usable' '#endif' '#endif' | $cc -E -P -x c "$include" - 2>/dev/null | grep '^uma ' || true)
  vulkan_version=$(printf '%s\n' "$answer" | sed -n 's/.*uma .*( *\([0-9]*\)U*)* *<< *22.*( *\([0-9]*\)U*)* *<< *12.*( *\([0-9][0-9]*\)).*/\1.\2.\3/p' | head -n 1)
  case $answer in
    *too-old*)
      vulkan_problem="the installed Vulkan headers (${vulkan_version:-older than 1.3.261}) are too old, llama.cpp needs 1.3.261 or newer: install newer ones (Debian 13, Ubuntu 24.04: libvulkan-dev spirv-headers), or unpack their .deb files anywhere with 'dpkg -x' and set VULKAN_SDK to the resulting usr directory" ;;
    *no-spirv*) vulkan_problem="the SPIR-V headers are missing: apt install spirv-headers, or set VULKAN_SDK to a directory with include/spirv" ;;
    *usable*) vulkan_problem='' ;;
    *) vulkan_problem="the Vulkan headers are missing: apt install libvulkan-dev spirv-headers glslc, or set VULKAN_SDK" ;;
  esac
  [ -z "$vulkan_problem" ] || return 0
  if ! have glslc && ! [ -x "${VULKAN_SDK:-/nowhere}/bin/glslc" ]; then
    vulkan_problem="the shader compiler is missing: apt install glslc"
    return 0
  fi
  for vulkan_library in "${VULKAN_SDK:-/nowhere}/lib/libvulkan.so" "$($cc -print-file-name=libvulkan.so 2>/dev/null)" "$($cc -print-file-name=libvulkan.so.1 2>/dev/null)"; do
    case $vulkan_library in /*) if [ -e "$vulkan_library" ]; then return 0; fi ;; esac
  done
  vulkan_problem="the Vulkan loader is missing: apt install libvulkan1"
}

# Zig's compiler links with the symbols of an old glibc and with a C++ library of its own, so the result runs on any
# distribution since 2018 (RHEL 8, Debian 10). No file has paths of this machine, so two builds of one source are equal.
tools=$work/tools
use_zig() {
  local zig="ziglang==0.17.1" language
  if [ "$("$tools/zig/bin/python" -m ziglang version 2>/dev/null)" != "${zig#*==}" ]; then
    say "Downloading $zig"
    mkdir -p "$logs" || no_room "$work"
    rm -rf "$tools/zig"
    "$python" -m venv --without-pip "$tools/zig" >"$logs/zig.log" 2>&1 || explain "Creating an environment for Zig" "$logs/zig.log"
    quietly "$logs/zig.log" "$python" -m pip --python "$tools/zig/bin/python" install --disable-pip-version-check "$zig" || explain "Downloading $zig" "$logs/zig.log"
  fi
  export ZIG_GLOBAL_CACHE_DIR=$work/zig-cache ZIG_LOCAL_CACHE_DIR=$work/zig-cache
  for language in cc c++; do
    printf '#!/bin/sh\nexec "%s" -m ziglang %s -target %s-linux-gnu.2.28 "-ffile-prefix-map=%s=" "$@"\n' "$tools/zig/bin/python" "$language" "$(uname -m)" "$work" >"$tools/zig/$language"
    chmod +x "$tools/zig/$language"
  done
  cc=$tools/zig/cc cxx=$tools/zig/c++
}

# nvcc does not work with Zig's compiler.
if [ -n "$portable" ] && [ "$(uname)" = Linux ] && [ "$plugin" != cuda ] && [ -z "${CC:-}" ]; then use_zig; else need_compiler; fi
reason='as requested' hint=''
if [ "$backend" = auto ] && [ "$(uname)" = Darwin ]; then
  if [ "$(uname -m)" = arm64 ]; then backend=metal reason='Apple Silicon'; else backend=cpu reason='Metal is not reliable on Intel Macs'; fi
fi
case $backend in auto | vulkan) check_vulkan ;; esac
case $backend in auto | cuda | hip)
  found=$("$python" -I "$root/llama_abi/gpus.py" "$vulkan_version" "$vulkan_problem") || die "llama_abi/gpus.py does not run in $python: set PYTHON to another one, or name a --backend"
  nvcc=$(printf '%s\n' "$found" | sed -n 4p)
  hipcc=$(printf '%s\n' "$found" | sed -n 5p) ;;
esac
case $backend in
  auto)
    backend=$(printf '%s\n' "$found" | sed -n 1p)
    reason=$(printf '%s\n' "$found" | sed -n 2p)
    hint=$(printf '%s\n' "$found" | sed -n 3p) ;;
  vulkan) [ -z "$vulkan_problem" ] || die "$vulkan_problem; or use --backend cpu" ;;
  metal) [ "$(uname)" = Darwin ] || die "Metal exists on macOS only: use --backend vulkan, cuda, hip or cpu" ;;
  cuda) [ -n "$nvcc" ] || die "no CUDA compiler found: install the CUDA toolkit and put nvcc on the PATH or set CUDA_HOME, or use --backend vulkan or cpu" ;;
  hip) [ -n "$hipcc" ] || die "no HIP compiler found: install ROCm and put hipcc on the PATH or set ROCM_PATH, or use --backend vulkan or cpu" ;;
esac
if [ -n "$cuda_arch" ] && [ "$backend" != cuda ]; then
  die "--cuda-arch is for the CUDA backend, and this build is for $backend ($reason): add --backend cuda"
fi

origin=\$ORIGIN
if [ "$(uname)" = Darwin ]; then origin=@loader_path; fi
options=(
  -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON
  -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
  -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF
  -DGGML_RPC=ON -DLLAMA_BUILD_MTMD=ON -DMTMD_VIDEO=OFF     # pictures and sound; video would start ffmpeg
  # One file per library. Each finds the others in its own directory, wherever that is.
  -DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON "-DCMAKE_INSTALL_RPATH=$origin"
)
cmake_minor=19
cxx_flags="${CXXFLAGS:+$CXXFLAGS }-w"      # -w: no warnings for code of another project
on() { if [ "$backend" = "$1" ]; then echo ON; else echo OFF; fi; }
options+=("-DGGML_METAL=$(on metal)" "-DGGML_VULKAN=$(on vulkan)" "-DGGML_CUDA=$(on cuda)")
if [ "$backend" = vulkan ]; then
  need_mib=1200
  options+=("-DVulkan_LIBRARY=$vulkan_library")
  if [ -n "${VULKAN_SDK:-}" ]; then
    options+=("-DVulkan_INCLUDE_DIR=$VULKAN_SDK/include" "-DCMAKE_PREFIX_PATH=$VULKAN_SDK")
    cxx_flags="$cxx_flags -I$VULKAN_SDK/include"
  fi
elif [ "$backend" = cuda ]; then
  need_mib=3000 cmake_minor=24                # 3.24 is the first that finds out what the GPUs of this machine are
  options+=("-DCMAKE_CUDA_COMPILER=$nvcc")
  # The toolkit's libraries are found also where it has no entry in ld.so.conf: a plug-in finds NVIDIA's wheels, of CUDA
  # 13 and of CUDA 12, next to its own.
  toolkit=$("$nvcc" -v no-such-file 2>&1 | sed -n 's/^#\$ TOP=//p' || true)
  for folder in lib64 lib; do                 # lib: toolkits that pip and conda install
    if [ -n "$toolkit" ] && [ -d "$toolkit/$folder" ]; then
      options+=("-DCMAKE_INSTALL_RPATH=$origin;$(cd "$toolkit/$folder" && pwd -P)")
      break
    fi
  done
  if [ -n "$plugin" ]; then
    nvidia=$origin/../../nvidia
    options+=("-DCMAKE_INSTALL_RPATH=$origin;$nvidia/cu13/lib;$nvidia/cublas/lib;$nvidia/cuda_runtime/lib")
  fi
  if [ -n "$cuda_arch" ]; then options+=("-DCMAKE_CUDA_ARCHITECTURES=$cuda_arch"); fi
elif [ "$backend" = hip ]; then
  need_mib=3000 cmake_minor=21                # 3.21 is the first that knows HIP
  rocm=${hipcc%/bin/hipcc}
  export ROCM_PATH=${ROCM_PATH:-$rocm}
  options+=(-DGGML_HIP=ON "-DCMAKE_INSTALL_RPATH=$origin;$rocm/lib")
  for clang in "$rocm/llvm/bin/clang++" "$rocm/lib/llvm/bin/clang++"; do
    if [ -x "$clang" ]; then options+=("-DCMAKE_HIP_COMPILER=$clang"); break; fi
  done
fi
if [ -n "$portable" ]; then            # without OpenMP, ggml has threads of its own
  options+=(-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_OPENMP=OFF)
  if [ -n "$plugin" ]; then options+=(-DGGML_CPU=OFF); else options+=(-DGGML_CPU_ALL_VARIANTS=ON); fi
  if [ "$(uname)" = Linux ]; then options+=(-DCMAKE_SHARED_LINKER_FLAGS=-s -DCMAKE_MODULE_LINKER_FLAGS=-s); fi
fi
options+=("-DCMAKE_C_FLAGS=${CFLAGS:+$CFLAGS }-w" "-DCMAKE_CXX_FLAGS=$cxx_flags")
if [ -n "${CMAKE_ARGS:-}" ]; then
  for option in $CMAKE_ARGS; do options+=("$option"); done
fi

# What the stamp tells of them: for all machines, no path of this one.
stamped=()
for option in "${options[@]}"; do
  case $portable$option in -portable*/*) ;; *) stamped+=("$option") ;; esac
done

# The peers are further targets of the same build directory, so they link the same objects as the library.
configure=("${options[@]}") targets=()
peers_dir=$work/peers
if [ -n "$peers" ]; then
  need_mib=$((need_mib + 200))
  configure+=(-DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_OPENSSL=OFF)
  targets+=(llama-server llama-batched-bench llama-bench)
fi

say "Backend: $backend ($reason)${portable:+, for all machines of this architecture}${plugin:+, as a plug-in}"

if [ "$installed" != installed ]; then install_package; fi

# ── what is left to do ──────────────────────────────────────────────────────────────────

origin_of_source=$pin
if [ -n "$source" ]; then
  origin_of_source=''
  # a folder without a history of its own may be inside another checkout
  if [ -e "$source/.git" ]; then origin_of_source=$(git -C "$source" describe --always --dirty --tags 2>/dev/null || true); fi
  origin_of_source="source:${origin_of_source:-$(basename "$source")}"
fi

state() {
  "$python" - "$prefix" "$origin_of_source" "$backend" "${stamped[@]}" <<'PY'
import sys
from pathlib import Path
from llama_abi.stamp import required_action
directory, source, backend, *options = sys.argv[1:]
print(*required_action(Path(directory), source=source, backend=backend, options=tuple(options)), sep="\n")
PY
}
todo=$(state) || die "the package cannot be imported in $python: run this script with --clean"
why=$(printf '%s\n' "$todo" | sed -n 2p)
todo=$(printf '%s\n' "$todo" | sed -n 1p)
if [ -n "$clean" ]; then
  todo=build why='--clean'
elif [ -n "$source" ]; then
  todo=build why='the checkout may have changed'
fi

check_and_stamp() {
  local arguments option
  arguments=("$prefix/include" --stamp "$backend" --source "$origin_of_source")
  for option in "${stamped[@]}"; do arguments+=("--option=$option"); done
  CC=$cc "$python" -m llama_abi.check "${arguments[@]}" || die "the library is built, but its header and the declarations in llama_abi differ (see above), so it is not stamped and cannot be loaded"
}

peers_wanted=$(printf '%s\n' "$origin_of_source" "$backend" "$cc" "$cxx" "${configure[@]}")

# Whether the peers exist, were built from this source with these flags, and use the same library files.
peers_are_ready() {
  local library
  if [ -n "$clean$source" ] || [ "$(cat "$peers_dir/built-from" 2>/dev/null)" != "$peers_wanted" ]; then return 1; fi
  for library in "$prefix"/lib*; do cmp -s "$library" "$peers_dir/bin/${library##*/}" || return 1; done
}

finish() {
  local kind=library
  if [ -n "$plugin" ]; then kind=plug-in; fi
  say "Done in $((SECONDS - started)) s: $backend $kind in $prefix"
  if [ -n "$peers" ]; then say "The peers for benches/ are in $peers_dir/bin"; fi
  if [ -n "$plugin" ]; then
    say "To use it: make its wheel, python llama_abi/wheels/make.py --library $(printf %q "$prefix"), and install it next to uma-trio-llama"
    exit 0
  fi
  if [ "$prefix" != "$root/llama_abi/lib" ]; then say "To use it: export UMA_LLAMA_DIR=$(printf %q "$prefix")"; fi
  if [ -n "$library_only" ]; then
    if [ -n "$hint" ]; then say "Note: $hint"; fi
    exit 0
  fi
  case ":$PATH:" in
    *":$scripts:"*) say "Next: uma-trio serve" ;;
    *) say "Next: $scripts/uma-trio serve    ($scripts is not on your PATH)" ;;
  esac
  if [ -n "$hint" ]; then say "Note: $hint"; fi
  exit 0
}

if [ "$todo" = check ]; then
  say "Checking again: $why"
  check_and_stamp
  todo=nothing
fi
if [ "$todo" = build ]; then
  if [ -n "$plugin" ]; then targets+=("ggml-$plugin"); else targets+=(llama mtmd); fi
elif [ -z "$peers" ] || peers_are_ready; then
  finish
else
  why='the peers are missing or outdated'
fi


# Refuses a folder with a file of somebody else, which an installation would remove.
refuse_folder_of_others() {
  local each
  if [ -L "$prefix" ]; then die "$prefix is a link: give the folder that it leads to as --prefix"; fi
  if [ -e "$prefix" ] && ! [ -d "$prefix" ]; then die "$prefix is a file: choose another --prefix"; fi
  for each in "$prefix"/* "$prefix"/.[!.]* "$prefix"/include/* "$prefix"/include/.[!.]*; do
    if ! [ -e "$each" ] && ! [ -L "$each" ]; then continue; fi
    case ${each#"$prefix"/} in
      include) if [ -d "$each" ] && { [ -f "$each/llama.h" ] || [ -f "$prefix/stamp.json" ]; }; then continue; fi ;;
      include/*.h | lib*.so | lib*.dylib | stamp.json) if ! [ -d "$each" ]; then continue; fi ;;
    esac
    die "$prefix was not made by this script, or has other files (${each#"$prefix"/}): choose another --prefix"
  done
}
if [ "$todo" = build ]; then refuse_folder_of_others; fi

# ── source ────────────────────────────────────────────────────────────────────────────────────

sha256() { if have sha256sum; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d' ' -f1; }

mkdir -p "$work" "$logs" 2>/dev/null || no_room "$work"
check_compiler
tree=$work/llama.cpp            # the source; tests also use its models/ggml-vocab-*.gguf

if [ -n "$source" ]; then
  if [ -L "$tree" ] || ! [ -e "$tree" ]; then rm -f "$tree"; ln -s "$source" "$tree"; fi
  code=$source
else
  code=$tree
  if [ -L "$tree" ] || [ "$(cat "$tree/.unpacked" 2>/dev/null)" != "$pin_sha256" ]; then
    need_room "$work" "$need_mib"
    if ! [ -f "$archive" ]; then
      say "Downloading the source of $pin"
      quietly "$logs/fetch.log" "$python" -m pip download --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
        --require-hashes -r "$root/llama_abi/pin.txt" -d "$work/download" || explain "Downloading $pin" "$logs/fetch.log" "build a llama.cpp checkout that you have with --source DIR"
    fi
    [ -f "$archive" ] || die "pip did not download $(basename "$archive")" "$logs/fetch.log"
    actual=$(sha256 "$archive")
    if [ "$actual" != "$pin_sha256" ]; then
      rm -f "$archive"
      die "the archive of $pin had the SHA-256 $actual instead of $pin_sha256, and was removed: run this script again, and if this repeats use another package index"
    fi
    say "Unpacking the source"
    rm -rf "$tree" "$tree.new"
    mkdir "$tree.new"
    inside=$(basename "$archive" .tar.gz)/vendor/llama.cpp
    quietly "$logs/unpack.log" tar -xzf "$archive" -C "$tree.new" --strip-components 3 --exclude "$inside/docs/*" --exclude "$inside/media/*" "$inside" ||
      explain "Unpacking" "$logs/unpack.log"
    printf '%s\n' "$pin_sha256" >"$tree.new/.unpacked" || no_room "$work"
    mv "$tree.new" "$tree"
  fi
fi

# Two defects of the AMX kernels:
#
# - They load the tile configuration with an intrinsic whose memory operand GCC 12 declares as 8 bytes long. The compiler
#   then removes the stores to the other 56 bytes, and the first quantized matrix product crashes on a CPU with AMX.
#   (Without AMX the product would be two to three times slower.)
# - One weight matrix may be multiplied with several activation matrices, as recurrent and hybrid models do with the
#   sequences of a batch. The kernels then read behind the weights, and add byte offsets to pointers to floats. All
#   sequences but the first one are wrong, and memory behind the result is overwritten.
repair_source() {
  local file=$tree/ggml/src/ggml-cpu/amx/mmq.cpp load='    _tile_loadconfig(&tc);'
  local first='    const int64_t i2 = batch_idx % ne2;' second='    const int64_t i3 = batch_idx / ne2;'
  if [ -f "$file" ] && ! grep -q 'uma-trio: one matrix' "$file"; then
    awk -v load="$load" -v first="$first" -v second="$second" '
      $0 == load && before !~ /uma-trio/ { print "    __asm__ volatile(\"\" : : \"r\"(&tc) : \"memory\");  // uma-trio: keeps the stores above" }
      $0 == first { $0 = "    const int64_t i2 = (batch_idx % ne2) / (ne2 / t->ne[2]);  // uma-trio: one matrix may serve several" }
      $0 == second { $0 = "    const int64_t i3 = (batch_idx / ne2) % t->ne[3];" }
      /dst_offset +=/ { sub(/ggml_batch_offset\(dst, +batch_idx, ne2\)/, "& / (int64_t) sizeof(float)") }
      /src1_offset +=/ && before ~ /src0_offset/ { sub(/ggml_batch_offset\(src1, batch_idx, ne2\)/, "& / (int64_t) sizeof(float)") }
      { print; before = $0 }' "$file" >"$file.new" || no_room "$work"
    mv "$file.new" "$file"
  fi
}
if [ -z "$source" ]; then
  repair_source
elif ! grep -q 'uma-trio: one matrix' "$code/ggml/src/ggml-cpu/amx/mmq.cpp" 2>/dev/null && grep -q amx_tile /proc/cpuinfo 2>/dev/null && $cc --version | grep -q 'Free Software Foundation'; then
  say "Note: this CPU has AMX, and GCC 12 miscompiles llama.cpp for it. If decoding crashes, set CFLAGS and CXXFLAGS to '-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'"
fi

# ── cmake, ninja ──────────────────────────────────────────────────────────────────────────────

cmake_is_new_enough() { "$1" --version 2>/dev/null | awk 'NR == 1 { split($3, v, "."); exit !(v[1] > 3 || v[1] == 3 && v[2] >= '"$cmake_minor"') }'; }
cmake=cmake ninja=ninja
if ! have cmake || ! cmake_is_new_enough cmake; then cmake=$tools/bin/cmake; fi
if ! have ninja; then ninja=$tools/bin/ninja; fi
missing=''
if [ "$cmake" != cmake ] && ! "$cmake" --version >/dev/null 2>&1; then missing="$missing cmake"; fi
if [ "$ninja" != ninja ] && ! "$ninja" --version >/dev/null 2>&1; then missing="$missing ninja"; fi
if [ -n "$missing" ]; then
  say "Downloading$missing"
  rm -rf "$tools/bin" "$tools/lib"
  "$python" -m venv --without-pip "$tools" >"$logs/tools.log" 2>&1 || explain "Creating an environment for$missing" "$logs/tools.log"
  # shellcheck disable=SC2086  # two words are two packages
  quietly "$logs/tools.log" "$python" -m pip --python "$tools/bin/python" install --disable-pip-version-check cmake ninja || explain "Downloading$missing" "$logs/tools.log" "install cmake 3.$cmake_minor or newer and ninja in another way"
fi

# ── build ─────────────────────────────────────────────────────────────────────────────────────

build=$work/cmake-$backend$portable
if [ -n "$clean" ]; then rm -rf "$build"; fi
wanted=$(printf '%s\n' "$build" "$code" "$cc" "$cxx" "$cmake" "$ninja" "${options[@]}")
if [ "$(cat "$build/.wanted" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$build"               # options, tools or the checkout have changed
  need_room "$work" 300
fi

if [ -z "$jobs" ]; then
  cpus=$(nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
  gib=$(awk '/MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo 2>/dev/null || echo "$cpus")
  jobs=$cpus
  if [ -n "$gib" ] && [ "$gib" -lt "$jobs" ]; then jobs=$gib; fi
  if [ "$jobs" -lt 1 ]; then jobs=1; fi
fi

if ! [ -f "$build/.wanted" ] || [ -n "$peers" ]; then
  say "Configuring ($why)"
  if ! CC=$cc CXX=$cxx quietly "$logs/configure-$backend.log" "$cmake" -S "$code" -B "$build" -G Ninja "-DCMAKE_MAKE_PROGRAM=$(command -v "$ninja")" "${configure[@]}"; then
    log=$logs/configure-$backend.log
    if [ "$backend" = cuda ]; then explain_cuda "$log"; fi
    if grep -q 'SPIRV-Headers' "$log"; then die "cmake cannot find the SPIR-V headers: apt install spirv-headers, or set VULKAN_SDK" "$log"; fi
    if grep -Eq 'is not able to compile a simple test program|broken' "$log"; then die "the C++ compiler $cxx does not work: install a complete one (Debian, Ubuntu: apt install g++)" "$log"; fi
    explain "Configuring" "$log"
  fi
  printf '%s\n' "$wanted" >"$build/.wanted" || no_room "$work"
fi

if [ "$backend" = cuda ]; then
  say "Compiling with $jobs jobs; the CUDA kernels take about $((60 / jobs + 1)) minutes for each architecture"
else
  say "Compiling with $jobs jobs"
fi
log=$logs/compile-$backend.log
status=0
if [ -t 1 ]; then
  "$ninja" -C "$build" -j "$jobs" "${targets[@]}" || status=$?
else
  "$ninja" -C "$build" -j "$jobs" "${targets[@]}" 2>&1 | tee "$log" || status=$?
fi
if [ $status -ne 0 ]; then
  free=$(free_mib "$work")
  if [ -n "$free" ] && [ "$free" -lt 20 ]; then die "the disk is full ($free MiB free in $work): free about $need_mib MiB and run this script again"; fi
  if grep -Eq 'Killed signal|internal compiler error: Killed' "$log" 2>/dev/null; then die "the compiler ran out of memory: run this script again with --jobs 1"; fi
  die "compiling failed: see the first 'error:' above; if it is about memory, use --jobs 1"
fi

# ── installation ──────────────────────────────────────────────────────────────────────────

# Copies to a new directory and then renames it: a daemon that has mapped the old files keeps them.
install_library() {
  local fresh=$prefix.new files=("$build"/bin/libggml* "$build"/bin/libllama.* "$build"/bin/libmtmd.*)
  if [ -n "$plugin" ]; then files=("$build"/bin/libggml-"$plugin".*); fi
  rm -rf "$fresh"
  { mkdir -p "$fresh/include" && cp "${files[@]}" "$fresh/" &&
    cp "$code"/include/llama.h "$code"/ggml/include/*.h "$code"/tools/mtmd/mtmd.h "$code"/tools/mtmd/mtmd-helper.h "$fresh/include/"; } 2>"$logs/copy.log" || explain "Copying the library to $prefix" "$logs/copy.log"
  if [ -d "$prefix" ]; then
    rm -rf "$prefix/include"
    rm -f "$prefix"/lib* "$prefix/stamp.json"
    rmdir "$prefix" || die "$prefix has files that this script did not make: move them away, or choose another --prefix"
  fi
  mv "$fresh" "$prefix"
  check_and_stamp
}

# Copies the installed library last, so that the peers run on the same library files.
install_peers() {
  local fresh=$peers_dir.new
  rm -rf "$fresh"
  {
    mkdir -p "$fresh/bin" && cp "$build"/bin/lib* "$fresh/bin/" && cp "$prefix"/lib* "$fresh/bin/" &&
      cp "$build/bin/llama-server" "$build/bin/llama-batched-bench" "$build/bin/llama-bench" "$fresh/bin/" &&
      printf '%s\n' "$peers_wanted" >"$fresh/built-from"
  } 2>"$logs/copy.log" || explain "Copying the peers to $peers_dir" "$logs/copy.log"
  rm -rf "$peers_dir"
  mv "$fresh" "$peers_dir"
}

if [ "$todo" = build ]; then install_library; fi
if [ -n "$peers" ]; then install_peers; fi
finish
