"""Tests for build_llama.sh without building: the backend that it chooses, and one sentence with the remedy for every
requirement that is missing.

Nothing is compiled, installed or downloaded: fake tools answer the script's questions.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "build_llama.sh"
TOOLS = ["bash", "dirname", "cut", "sed", "awk", "grep", "df", "uname", "cat", "mkdir", "rm", "tail", "head", "ls"]

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A directory for PATH without a compiler and without Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    return folder


def fake(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def python(
    folder: Path,
    *,
    version: str = "3.11.2 new",
    pip: str = "pip",
    todo: str = "",
    more: str = "",
    has_attrs: bool = True,
) -> Path:
    """A fake interpreter for a machine whose files are in ``folder``.

    Args:
        todo: what is left to do, ``build`` or ``nothing``; otherwise the script ends where it asks.
        more: shell commands that answer the other questions.
    """
    lines = [*version.split(), pip, "installed", "/nowhere/bin", "environment", "hash"]
    left = f"printf '{todo}\\nthe reason\\n'" if todo else "exit 1"
    return fake(
        folder / "fake-python",
        f"""case "$*" in
          -I*gpus.py*) exec {sys.executable} "$@" "{folder}" ;;
          *GGML_RPC*) {left}; exit ;;
          -c*fcntl*) exec {sys.executable} "$@" ;;
          -c*attrs*) {"" if has_attrs else "exit 1"} ;;
          -m*) {more} ;;
          *) printf '%s\\n' {" ".join(lines)} ;;
        esac""",
    )


IGNORED = ("VIRTUAL_ENV", "PYTHON", "VULKAN_SDK", "CC", "CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH")


def run(*arguments: str, script: Path = SCRIPT, **environment: str | Path) -> tuple[int, str]:
    clean = {name: value for name, value in os.environ.items() if name not in IGNORED}
    done = subprocess.run(
        [str(shutil.which("bash")), str(script), *arguments],
        env={**clean, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_help() -> None:
    code, said = run("--help")
    assert code == 0
    for option in (
        "--backend",
        "--cuda-arch",
        "--dev",
        "--peers",
        "--portable",
        "--prefix",
        "--jobs",
        "--source",
        "--library-only",
        "--clean",
        "--help",
    ):
        assert option in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--bakend", "cpu"], "unknown option --bakend"),
        (["--backend", "gpu"], "unknown backend 'gpu'"),
        (["--backend=gpu"], "unknown backend 'gpu'"),
        (["--cuda-arch", "80,90"], "--cuda-arch must be a list such as 90 or '80;89', not '80,90'"),
        (["--jobs", "0"], "--jobs must be a number from 1"),
        (["--jobs", "two"], "--jobs must be a number from 1"),
        (["--jobs"], "--jobs needs a value"),
        (["--source", "/nowhere"], "is not a llama.cpp checkout"),
        (["--peers=llama-server"], "unknown option --peers=llama-server"),
    ],
)
def test_wrong_options(arguments: list[str], complaint: str) -> None:
    code, said = run(*arguments)
    assert code == 1
    assert said.startswith("error: ")
    assert complaint in said
    assert len(said.splitlines()) == 1


def test_the_directory_of_the_peers() -> None:
    assert "build/peers/bin" in run("--help")[1]
    ignored = (SCRIPT.parent / ".gitignore").read_text().splitlines()
    assert "/build/" in ignored


def test_no_python(bare: Path) -> None:
    assert "install Python 3.11 or newer" in run(PATH=bare)[1]


def test_old_python(bare: Path) -> None:
    old = python(bare, version="3.9.2 old")
    code, said = run(PATH=bare, PYTHON=old)
    assert (code, len(said.splitlines())) == (1, 1)
    assert "Python 3.11 or newer is required, and" in said
    fake(bare / "python3.12", "")
    assert "python3.12 is installed: run  python3.12 -m venv .venv" in run(PATH=bare, PYTHON=old)[1]


def test_no_pip(bare: Path) -> None:
    assert "-m ensurepip" in run(PATH=bare, PYTHON=python(bare, pip="no-pip"))[1]


def test_no_compiler(bare: Path) -> None:
    code, said = run("--peers", PATH=bare, PYTHON=python(bare))
    assert (code, len(said.splitlines())) == (1, 1)
    assert "no C++ compiler found: install one (Debian, Ubuntu: apt install g++" in said


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="auto considers Vulkan on Linux only")
class TestVulkan:
    @pytest.fixture
    def sdk(self, tmp_path: Path) -> Path:
        """A directory like a Vulkan SDK of version 1.4.309, with SPIR-V headers, glslc and a loader."""
        for name in ("include/vulkan", "include/spirv/unified1", "lib", "bin"):
            (tmp_path / "sdk" / name).mkdir(parents=True)
        sdk = tmp_path / "sdk"
        for name in ("include/vulkan/vulkan.hpp", "include/spirv/unified1/spirv.hpp", "lib/libvulkan.so"):
            (sdk / name).touch()
        self.headers(sdk, 4, 309)
        fake(sdk / "bin" / "glslc", "")
        return sdk

    @staticmethod
    def headers(sdk: Path, minor: int, patch: int) -> None:
        parts = ("(((uint32_t)(0)) << 29U)", "(((uint32_t)(1)) << 22U)", f"(((uint32_t)({minor})) << 12U)")
        version = f"({' | '.join(parts)} | ((uint32_t)({patch})))"
        new = "#define VK_EXT_layer_settings 1\n" if (minor, patch) >= (3, 261) else ""
        (sdk / "include" / "vulkan" / "vulkan_core.h").write_text(
            f"#define VK_HEADER_VERSION_COMPLETE {version}\n{new}"
        )

    def auto(self, sdk: Path, tmp_path: Path, *arguments: str) -> str:
        # The machine that the fake interpreter shows has no GPU.
        first, last = run(*arguments, PYTHON=python(tmp_path), VULKAN_SDK=sdk)[1].splitlines()
        assert last.startswith("error: the package cannot be imported")
        return first

    def test_too_old_headers(self, sdk: Path, tmp_path: Path) -> None:
        self.headers(sdk, 3, 239)
        complaint = (
            "the installed Vulkan headers (1.3.239) are too old, llama.cpp needs 1.3.261 or newer: install newer ones"
        )
        code, said = run("--backend", "vulkan", PYTHON=python(tmp_path), VULKAN_SDK=sdk)
        assert (code, len(said.splitlines())) == (1, 1)
        assert complaint in said
        assert "or use --backend cpu" in said
        assert f"==> Backend: cpu (not Vulkan: {complaint}" in self.auto(sdk, tmp_path)

    def test_all_requirements_are_met(self, sdk: Path, tmp_path: Path) -> None:
        assert (
            self.auto(sdk, tmp_path) == "==> Backend: vulkan (Vulkan headers 1.4.309, glslc and a loader are installed)"
        )

    def test_the_cpu_on_request(self, sdk: Path, tmp_path: Path) -> None:
        assert self.auto(sdk, tmp_path, "--backend=cpu") == "==> Backend: cpu (as requested)"


@pytest.fixture
def checkout(bare: Path, tmp_path: Path) -> Path:
    """The script in a tree of its own, with a llama.cpp checkout, and a PATH with compilers that accept everything."""
    for name in ("build_llama.sh", "llama_abi/pin.txt", "llama_abi/gpus.py"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SCRIPT.parent / name, tmp_path / "tree" / name)
    (tmp_path / "llama.cpp" / "include").mkdir(parents=True)
    (tmp_path / "llama.cpp" / "include" / "llama.h").touch()
    for name in ("basename", "chmod", "cp", "ln", "mv", "nproc", "rmdir", "tee"):
        (bare / name).symlink_to(str(shutil.which(name)))
    for name in ("cc", "c++", "ninja"):
        fake(bare / name, "")
    return tmp_path


def build(
    checkout: Path, *arguments: str, source: bool = True, todo: str = "build", more: str = "", **options: Any
) -> tuple[int, str]:
    """Run the script of ``checkout`` up to its first error."""
    if source:
        arguments = (*arguments, "--source", str(checkout / "llama.cpp"))
    interpreter = python(checkout, todo=todo, more=more, **options)
    return run(*arguments, script=checkout / "tree" / "build_llama.sh", PATH=checkout / "bin", PYTHON=interpreter)


def cmake(checkout: Path, said: str = "", *, version: str = "3.30.1", code: int = 1) -> Path:
    """A fake cmake that writes its arguments to the file returned, says ``said`` and fails."""
    arguments = checkout / "cmake-arguments"
    fake(
        checkout / "bin" / "cmake",
        f"""[ "$1" != --version ] || {{ echo "cmake version {version}"; exit; }}
        printf '%s\\n' "$@" >{arguments}
        echo {said!r}; exit {code}""",
    )
    return arguments


def test_builds_of_one_checkout_take_turns(checkout: Path) -> None:
    interpreter = python(checkout, todo="build")
    work = checkout / "tree" / "build"
    work.mkdir(exist_ok=True)
    with (work / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        script = subprocess.Popen(
            [str(shutil.which("bash")), str(checkout / "tree" / "build_llama.sh")],
            env={"PATH": str(checkout / "bin"), "PYTHON": str(interpreter)},
            stdout=subprocess.PIPE,
            text=True,
        )
        with script:
            assert script.stdout is not None
            assert script.stdout.readline().startswith("==> Another ./build_llama.sh runs in ")
            python(checkout, todo="nothing")  # the other one has done it
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert "==> Next: " in script.stdout.read()
    assert script.returncode == 0


class TestManagedPython:
    """The operating system manages Python, and no environment is active."""

    def test_an_environment_is_made(self, checkout: Path) -> None:
        own = checkout / "own"
        own.mkdir()
        python(own, todo="nothing")
        made = f'case "$*" in "-m venv "*) mkdir -p "$3/bin" && cp {own}/fake-python "$3/bin/python" ;; esac'
        for times in (1, 0):
            code, said = build(checkout, source=False, pip="managed", more=made)
            assert (code, said.count("making the virtual environment .venv")) == (0, times), said
            assert "==> Next: /nowhere/bin/uma-trio serve" in said

    def test_no_module_venv(self, checkout: Path) -> None:
        code, said = build(checkout, source=False, pip="managed", more="exit 1")
        assert code == 1
        assert "apt install python3-venv" in errors(said)


class TestPortable:
    def test_rocm_has_no_plug_in(self, checkout: Path) -> None:
        code, said = build(checkout, "--portable", "--backend=hip")
        assert code == 1
        assert errors(said) == "error: --portable is for the CPU, Metal, Vulkan and CUDA: leave out --backend hip"

    def test_peers_are_no_plug_in(self, checkout: Path) -> None:
        code, said = build(checkout, "--portable", "--backend=vulkan", "--peers")
        assert (code, errors(said)) == (1, "error: --peers need a whole library: leave out --portable")

    def test_a_backend_alone_is_a_plug_in(self, checkout: Path) -> None:
        arguments = cmake(checkout)
        fake(checkout / "bin" / "nvcc", "echo release 13.0")
        _, said = build(checkout, "--portable", "--backend=cuda", "--library-only")
        assert "as a plug-in" in said, said
        given = {*arguments.read_text().splitlines()}
        assert {"-DGGML_CUDA=ON", "-DGGML_CPU=OFF", "-DGGML_BACKEND_DL=ON", "-DGGML_NATIVE=OFF"} <= given
        assert str(checkout / "tree" / "build" / "cmake-cuda-portable") in given

    def test_all_variants_are_built_for_an_old_glibc(self, checkout: Path) -> None:
        arguments = cmake(checkout)
        zig = checkout / "zig"
        fake(zig, "echo 0.17.1")
        made = f'case "$*" in *"venv --without-pip"*) mkdir -p "$4/bin" && cp {zig} "$4/bin/python" ;; esac'
        _, said = build(checkout, "--portable", "--library-only", more=made)
        assert "==> Downloading ziglang==" in said, said
        assert "==> Configuring" in said, said
        given = arguments.read_text().splitlines()
        assert {"-DGGML_NATIVE=OFF", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON"} <= {*given}
        compiler = (checkout / "tree" / "build" / "tools" / "zig" / "c++").read_text()
        assert "-linux-gnu.2.28" in compiler
        assert f"-ffile-prefix-map={checkout / 'tree' / 'build'}=" in compiler
        assert "prefix-map" not in "".join(given), "the stamp would have a path of this machine"
        assert str(checkout / "tree" / "build" / "cmake-cpu-portable") in given


def errors(said: str) -> str:
    """The last message, which must be one line, followed only by the name of a log file."""
    *_, error = [line for line in said.splitlines() if not line.startswith("       See ")]
    assert error.startswith("error: "), said
    assert said.count("error: ") == 1
    return error


class TestPrefix:
    """The folder of a library is replaced as a whole, so it must be one."""

    @pytest.mark.parametrize(
        "foreign", ["include/other.hpp", "include/folder/a.h", "include/mine.h", "bin/x", ".hidden"]
    )
    def test_a_folder_of_others_is_left_alone(self, checkout: Path, foreign: str) -> None:
        """Such as /usr/local, which has a folder include as well."""
        file = checkout / "usr" / "local" / foreign
        file.parent.mkdir(parents=True)
        file.touch()
        cmake(checkout)
        code, said = build(checkout, "--prefix", str(checkout / "usr" / "local"))
        assert code == 1
        assert "choose another --prefix" in errors(said)
        assert "==> Configuring" not in said
        assert file.exists()

    @pytest.mark.parametrize("name", ["lib/", "lib/.", ".//lib", "other/../lib"])
    def test_one_folder_has_one_name(self, checkout: Path, name: str) -> None:
        said = build(checkout, f"--prefix={checkout}/it's {name}", todo="nothing", source=False)[1]
        expected = os.path.normpath(f"{checkout}/it's {name}")
        [line] = [line for line in said.splitlines() if "export UMA_LLAMA_DIR=" in line]
        pasted = subprocess.run(
            ["sh", "-c", f'{line.split("To use it: ")[1]}; printf %s "$UMA_LLAMA_DIR"'], capture_output=True, text=True
        )
        assert pasted.stdout == expected


class TestLibraryOnly:
    """Without a package index: nothing is installed, and what pip would be asked for is not needed."""

    def test_nothing_is_installed(self, checkout: Path) -> None:
        arguments = cmake(checkout)
        no_pip = 'case "$*" in *pip*) echo "ERROR: No matching distribution"; exit 1 ;; esac'
        code, said = build(checkout, "--library-only", pip="managed", more=no_pip)
        assert "==> Configuring" in said, said
        assert "Installing" not in said
        assert "-DGGML_CUDA=OFF" in arguments.read_text().splitlines()
        assert code == 1, "the fake cmake configures nothing"

    def test_it_installs_no_requirements_either(self, checkout: Path) -> None:
        code, said = build(checkout, "--library-only", "--dev")
        assert code == 1
        assert "--library-only installs nothing, and --dev installs requirements" in errors(said)

    def test_the_check_needs_a_package(self, checkout: Path) -> None:
        code, said = build(checkout, "--library-only", has_attrs=False)
        assert code == 1
        assert "has no package attrs, which the check of the library needs" in errors(said)


class TestErrors:
    def test_a_compiler_that_is_too_old(self, checkout: Path) -> None:
        fake(checkout / "bin" / "c++", "echo 'error: unrecognized command line option -std=c++17'; exit 1")
        code, said = build(checkout)
        assert code == 1
        assert "the C++ compiler c++ cannot compile C++17, which llama.cpp needs: install GCC 9" in errors(said)

    def test_no_network_for_the_source(self, checkout: Path) -> None:
        offline = "echo 'ERROR: No matching distribution found for llama-cpp-python'; exit 1"
        code, said = build(checkout, source=False, more=offline)
        assert code == 1
        assert "pip found no package index that has it (No matching distribution found" in errors(said)
        assert "or build a llama.cpp checkout that you have with --source DIR" in errors(said)

    def test_no_network_for_cmake(self, checkout: Path) -> None:
        offline = 'case "$*" in *install*) echo "ERROR: Failed to establish a new connection"; exit 1 ;; esac'
        code, said = build(checkout, more=offline)
        assert code == 1
        assert "Downloading cmake failed because" in errors(said)
        assert "or install cmake 3.19 or newer and ninja in another way" in errors(said)

    def test_a_full_disk(self, checkout: Path) -> None:
        full = "echo 'OSError: [Errno 28] No space left on device'; exit 1"
        code, said = build(checkout, source=False, more=full)
        assert code == 1
        assert "the disk is full" in errors(said)
        assert "MiB and run this script again" in errors(said)

    @pytest.mark.parametrize(
        ("log", "complaint"),
        [
            (
                "CMake Error: CMAKE_CUDA_ARCHITECTURES is set to native, but no GPU was detected.",
                "no NVIDIA GPU found to build for: name its architecture, as in --cuda-arch 90",
            ),
            ("nvcc fatal   : Unsupported gpu architecture compute_13", "--list-gpu-arch lists them"),
            (
                "#error -- unsupported GNU version! gcc versions later than 13 are not supported!",
                "set CUDAHOSTCXX to an older compiler",
            ),
            ('Target "ggml-cuda" links to: CUDA::cublas', "the CUDA toolkit has no cuBLAS"),
            ('Target "ggml-cuda" links to: CUDA::cuda_driver', "set CMAKE_ARGS=-DGGML_CUDA_NO_VMM=ON"),
            (
                "-- Could NOT find CUDAToolkit (missing: CUDA_CUDART)",
                "nvcc is not complete, as those of Python packages",
            ),
            (
                "CUDA compiler identification: ld: cannot find -lcudart_static",
                "install the whole toolkit and set CUDA_HOME",
            ),
            (
                "The CUDA compiler nvcc is not able to compile a simple test program.",
                "does not work: install the whole",
            ),
        ],
    )
    def test_a_toolkit_that_cannot_build(self, checkout: Path, log: str, complaint: str) -> None:
        fake(checkout / "bin" / "nvcc", "")
        cmake(checkout, log)
        code, said = build(checkout, "--backend", "cuda")
        assert code == 1
        assert complaint in errors(said)

    @pytest.mark.parametrize(("backend", "tool"), [("cuda", "nvcc"), ("hip", "hipcc")])
    def test_a_backend_without_its_toolkit(self, checkout: Path, backend: str, tool: str) -> None:
        code, said = build(checkout, "--backend", backend)
        assert (code, len(said.splitlines())) == (1, 1)
        assert f"put {tool} on the PATH or set " in said


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="auto considers CUDA and ROCm on Linux only")
class TestGpus:
    @staticmethod
    def driver(checkout: Path, name: str) -> None:
        (checkout / "dev").mkdir()
        (checkout / "dev" / name).touch()

    def test_auto_builds_for_cuda(self, checkout: Path) -> None:
        self.driver(checkout, "nvidiactl")
        nvcc = checkout / "usr/local/cuda/bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        (checkout / "usr/local/cuda/lib64").mkdir()
        fake(nvcc, f"""echo '#$ TOP={nvcc.parent}/..' >&2; exit 1""")
        arguments = cmake(checkout)
        said = build(checkout, "--cuda-arch", "80;90")[1]
        assert f"==> Backend: cuda (this machine has an NVIDIA GPU with its driver, and {nvcc})" in said
        assert {
            "-DGGML_CUDA=ON",
            f"-DCMAKE_CUDA_COMPILER={nvcc}",
            "-DCMAKE_CUDA_ARCHITECTURES=80;90",
            f"-DCMAKE_INSTALL_RPATH=$ORIGIN;{checkout}/usr/local/cuda/lib64",
        } <= set(arguments.read_text().splitlines())

    @pytest.mark.parametrize("folders", [["lib64", "lib"], ["lib"], []], ids=" ".join)
    def test_where_the_libraries_of_the_toolkit_are(self, checkout: Path, folders: list[str]) -> None:
        nvcc = checkout / "usr/local/cuda/bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        for folder in folders:
            (checkout / "usr/local/cuda" / folder).mkdir()
        fake(nvcc, f"""echo '#$ TOP={nvcc.parent}/..' >&2; exit 1""")
        arguments = cmake(checkout)
        build(checkout, "--backend", "cuda", "--cuda-arch", "90")
        paths = [each for each in arguments.read_text().splitlines() if each.startswith("-DCMAKE_INSTALL_RPATH=")]
        expected = (
            f"-DCMAKE_INSTALL_RPATH=$ORIGIN;{checkout}/usr/local/cuda/{folders[0]}"
            if folders
            else "-DCMAKE_INSTALL_RPATH=$ORIGIN"
        )
        assert paths[-1] == expected

    def test_auto_builds_for_rocm(self, checkout: Path) -> None:
        self.driver(checkout, "kfd")
        for name in ("bin/hipcc", "llvm/bin/clang++"):
            (checkout / "opt/rocm" / name).parent.mkdir(parents=True)
            fake(checkout / "opt/rocm" / name, "")
        arguments = cmake(checkout)
        said = build(checkout)[1]
        assert "==> Backend: hip (this machine has an AMD GPU with its driver" in said
        compiler = f"-DCMAKE_HIP_COMPILER={checkout}/opt/rocm/llvm/bin/clang++"
        assert {"-DGGML_HIP=ON", "-DGGML_CUDA=OFF", compiler} <= set(arguments.read_text().splitlines())

    def test_cuda_needs_a_newer_cmake(self, checkout: Path) -> None:
        fake(checkout / "bin" / "nvcc", "")
        cmake(checkout, version="3.22.1")
        said = build(checkout, "--backend", "cuda", more="exit 1")[1]
        assert "==> Downloading cmake" in said

    def test_the_last_line_names_the_toolkit_that_a_gpu_lacks(self, checkout: Path) -> None:
        self.driver(checkout, "nvidiactl")
        code, said = build(checkout, source=False, todo="nothing")
        assert code == 0
        assert said.splitlines()[-1] == (
            "==> Note: this machine has an NVIDIA GPU, which this library does not use: "
            "install the CUDA toolkit, then run ./build_llama.sh --backend cuda"
        )

    def test_an_architecture_for_another_backend(self, checkout: Path) -> None:
        code, said = build(checkout, "--cuda-arch", "90")
        assert (code, len(said.splitlines())) == (1, 1)
        assert "--cuda-arch is for the CUDA backend, and this build is for cpu" in said
