"""Which backend build_llama.sh chooses, on machines that are made of folders and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_abi import gpus
from llama_abi.gpus import AMD, NVIDIA, Choice, Gpus

NO_VULKAN = "the Vulkan headers are missing: apt install libvulkan-dev spirv-headers glslc, or set VULKAN_SDK"
MODEL = "NVIDIA H100 80GB HBM3"


class Machine:
    """A folder that stands for ``/``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {"PATH": str(root / "usr/bin")}

    def write(self, name: str, text: str = "", *, mode: int = 0o644) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def tool(self, name: str) -> str:
        return str(self.write(name, "#!/bin/sh\n", mode=0o755))

    def plug_in(self, vendor: gpus.Vendor, device_class: str = "0x030200") -> None:
        self.write("sys/bus/pci/devices/0000:01:00.0/vendor", f"{vendor.pci_id}\n")
        self.write("sys/bus/pci/devices/0000:01:00.0/class", f"{device_class}\n")

    def load_driver(self, vendor: gpus.Vendor) -> None:
        self.write(vendor.driver_files[0])

    def look(self) -> tuple[Gpus, Gpus]:
        return gpus.look(self.root, self.environment)

    def choose(self, vulkan_problem: str = NO_VULKAN) -> Choice:
        return gpus.choose(self.look(), vulkan_version="1.4.309", vulkan_problem=vulkan_problem)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_without_a_gpu(machine: Machine) -> None:
    assert machine.look() == (Gpus(NVIDIA), Gpus(AMD))
    assert machine.choose() == Choice("cpu", f"not Vulkan: {NO_VULKAN}")
    assert machine.choose("") == Choice("vulkan", "Vulkan headers 1.4.309, glslc and a loader are installed")


def test_nvidia_with_driver_and_toolkit(machine: Machine) -> None:
    machine.load_driver(NVIDIA)
    machine.write("proc/driver/nvidia/gpus/0000:01:00.0/information", f"Model: \t\t {MODEL}\nIRQ: 1\n")
    nvcc = machine.tool("usr/bin/nvcc")
    for problem in ("", NO_VULKAN):
        assert machine.choose(problem) == Choice(
            "cuda", f"this machine has an NVIDIA GPU ({MODEL}) with its driver, and {nvcc}"
        )


def test_amd_with_driver_and_toolkit(machine: Machine) -> None:
    machine.load_driver(AMD)
    hipcc = machine.tool("opt/rocm-6.4.1/bin/hipcc")
    for problem in ("", NO_VULKAN):
        assert machine.choose(problem) == Choice("hip", f"this machine has an AMD GPU with its driver, and {hipcc}")


def test_where_the_toolkit_is_found(machine: Machine) -> None:
    def nvcc() -> str:
        return machine.look()[0].compiler

    newest = [machine.tool(f"usr/local/cuda-{version}/bin/nvcc") for version in ("9.2", "12.8", "13.0")][-1]
    assert nvcc() == newest
    usual = machine.tool("usr/local/cuda/bin/nvcc")
    assert nvcc() == usual
    machine.environment["CUDA_HOME"] = str(machine.root / "home")
    assert nvcc() == usual, "a variable that names no toolkit does not hide one"
    home = machine.tool("home/bin/nvcc")
    assert nvcc() == home
    on_path = machine.tool("usr/bin/nvcc")
    assert nvcc() == on_path
    machine.environment["CUDACXX"] = home
    assert nvcc() == home
    machine.environment["ROCM_PATH"] = str(machine.root / "amd")
    hipcc = machine.tool("amd/bin/hipcc")
    assert machine.look()[1].compiler == hipcc


def test_a_driver_without_a_toolkit(machine: Machine) -> None:
    machine.plug_in(NVIDIA)
    machine.load_driver(NVIDIA)
    fix = "install the CUDA toolkit, then run ./build_llama.sh --backend cuda"
    assert machine.choose() == Choice(
        "cpu", f"not Vulkan: {NO_VULKAN}", f"this machine has an NVIDIA GPU, which this library does not use: {fix}"
    )
    through_vulkan = machine.choose("")
    assert through_vulkan.backend == "vulkan"
    assert through_vulkan.hint == f"this machine has an NVIDIA GPU, which this library uses through Vulkan only: {fix}"


def test_a_gpu_without_a_driver(machine: Machine) -> None:
    machine.plug_in(NVIDIA)
    rebuild = "then run ./build_llama.sh --backend cuda"
    assert machine.choose().backend == "cpu"
    assert machine.choose().hint.endswith(f": install its driver and the CUDA toolkit, {rebuild}")
    machine.tool("usr/bin/nvcc")
    assert machine.choose().backend == "cpu"
    assert machine.choose().hint.endswith(f": install its driver, {rebuild}")


def test_amd_without_rocm(machine: Machine) -> None:
    machine.plug_in(AMD)
    machine.load_driver(AMD)
    assert machine.choose("").hint == "", "Vulkan uses it"
    assert machine.choose().hint == (
        "this machine has an AMD GPU, which this library does not use: "
        "install ROCm, then run ./build_llama.sh --backend hip"
    )


def test_a_toolkit_without_a_gpu(machine: Machine) -> None:
    """As where an image for another machine is built."""
    machine.plug_in(NVIDIA, device_class="0x040300")  # the sound device of a GPU that was passed to another machine
    nvcc = machine.tool("usr/bin/nvcc")
    assert machine.choose().backend == "cpu"
    assert machine.choose().hint == (
        f"{nvcc} is installed, but this machine has no NVIDIA GPU: "
        "to build for another machine, add --backend cuda and --cuda-arch"
    )


def test_what_build_llama_reads(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", machine.environment["PATH"])
    for name in ("CUDACXX", *NVIDIA.variables, *AMD.variables):
        monkeypatch.delenv(name, raising=False)
    hipcc = machine.tool("opt/rocm/bin/hipcc")
    gpus.main(["1.4.309", "", str(machine.root)])
    backend, reason, hint, nvcc, found = capsys.readouterr().out.split("\n")[:5]
    assert (backend, reason, hint, nvcc, found) == (
        "vulkan", "Vulkan headers 1.4.309, glslc and a loader are installed", "", "", hipcc
    )  # fmt: skip


def test_it_needs_the_standard_library_only() -> None:
    """build_llama.sh runs it before it installs the package."""
    source = Path(gpus.__file__).read_text()
    imported = {line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imported == {"__future__", "os", "re", "shutil", "sys", "collections.abc", "dataclasses", "pathlib"}
