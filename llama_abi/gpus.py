"""The GPUs of this machine, the toolkits to build for them, and the backend that build_llama.sh chooses.

    python -I llama_abi/gpus.py VULKAN_VERSION VULKAN_PROBLEM [ROOT]

prints a line each for build_llama.sh: the backend, the reason, a hint for the user, nvcc and hipcc. The script runs this
before it installs anything, so this module needs the standard library only. It reads files and starts no process.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DISPLAY_CLASS = "0x03"
"""First digits of the PCI class of GPUs, with and without a display."""


@dataclass(frozen=True)
class Vendor:
    """A vendor with a toolkit of its own."""

    name: str
    backend: str
    toolkit: str
    compiler: str
    variables: tuple[str, ...]
    """Environment variables that may name the folder of the toolkit."""
    folders: tuple[str, ...]
    """Where the toolkit usually is, as patterns; the newest version wins."""
    pci_id: str
    driver_files: tuple[str, ...]
    """The driver is loaded, and this process may see its GPUs, if one of these exists."""

    @property
    def article(self) -> str:
        return f"an {self.name} GPU"


NVIDIA = Vendor(
    name="NVIDIA",
    backend="cuda",
    toolkit="the CUDA toolkit",
    compiler="nvcc",
    variables=("CUDA_HOME", "CUDA_PATH"),
    folders=("usr/local/cuda", "usr/local/cuda-*", "opt/cuda"),
    pci_id="0x10de",
    # The kernel module on a PC, in the Windows subsystem for Linux, and on a Jetson.
    driver_files=("dev/nvidiactl", "usr/lib/wsl/lib/libcuda.so.1", "dev/nvhost-gpu"),
)
AMD = Vendor(
    name="AMD",
    backend="hip",
    toolkit="ROCm",
    compiler="hipcc",
    variables=("ROCM_PATH",),
    folders=("opt/rocm", "opt/rocm-*"),
    pci_id="0x1002",
    driver_files=("dev/kfd",),
)


@dataclass(frozen=True)
class Gpus:
    """What this machine has of one vendor."""

    vendor: Vendor
    names: tuple[str, ...] = ()
    """Names of the GPUs. Only NVIDIA's driver tells them, and not everywhere."""
    has_gpu: bool = False
    """A GPU is plugged in, or a driver is loaded."""
    has_driver: bool = False
    compiler: str = ""
    """Path of the toolkit's compiler; empty without a toolkit."""

    def __str__(self) -> str:
        return f"{self.vendor.article}{f' ({self.names[0]})' if self.names else ''}"

    @property
    def fix(self) -> str:
        """What to install and to run for a library that computes on these GPUs."""
        missing = ["its driver"] if not self.has_driver else []
        if not self.compiler:
            missing.append(self.vendor.toolkit)
        build = f"./build_llama.sh --backend {self.vendor.backend}"
        return f"install {' and '.join(missing)}, then run {build}" if missing else f"run {build}"


@dataclass(frozen=True)
class Choice:
    """The backend for this machine."""

    backend: str
    reason: str
    hint: str = ""
    """What it takes to use a GPU that the library will not use."""


def look(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> tuple[Gpus, Gpus]:
    """Return what this machine has of NVIDIA and of AMD.

    Args:
        root: the folder that stands for ``/``.
        environment: its ``PATH`` and the variables of the toolkits.
    """
    nvidia, amd = (_look_for(vendor, root, environment) for vendor in (NVIDIA, AMD))
    return nvidia, amd


def choose(gpus: tuple[Gpus, ...], *, vulkan_version: str, vulkan_problem: str) -> Choice:
    """Choose the backend: CUDA or ROCm where driver and toolkit are found, otherwise Vulkan, otherwise the CPU.

    Args:
        vulkan_problem: why Vulkan cannot be built, with the remedy; empty if it can be built.
    """
    for of_vendor in gpus:
        if of_vendor.has_driver and of_vendor.compiler:
            return Choice(
                of_vendor.vendor.backend, f"this machine has {of_vendor} with its driver, and {of_vendor.compiler}"
            )
    if vulkan_problem:
        return Choice("cpu", f"not Vulkan: {vulkan_problem}", _hint(gpus))
    reason = f"Vulkan headers {vulkan_version}, glslc and a loader are installed"
    return Choice("vulkan", reason, _hint(gpus, vulkan=True))


def _hint(gpus: tuple[Gpus, ...], *, vulkan: bool = False) -> str:
    for of_vendor in gpus:
        # Vulkan is the usual way to use an AMD GPU, many of which ROCm does not support.
        if of_vendor.has_gpu and not (vulkan and of_vendor.vendor is AMD):
            use = "uses through Vulkan only" if vulkan else "does not use"
            return f"this machine has {of_vendor}, which this library {use}: {of_vendor.fix}"
    for of_vendor in gpus:
        if of_vendor.vendor is NVIDIA and of_vendor.compiler:
            return (
                f"{of_vendor.compiler} is installed, but this machine has no NVIDIA GPU: "
                "to build for another machine, add --backend cuda and --cuda-arch"
            )
    return ""


def _look_for(vendor: Vendor, root: Path, environment: Mapping[str, str]) -> Gpus:
    has_driver = any((root / name).exists() for name in vendor.driver_files)
    return Gpus(
        vendor,
        names=_names(root) if vendor is NVIDIA and has_driver else (),
        has_gpu=has_driver or _is_plugged_in(vendor, root),
        has_driver=has_driver,
        compiler=_compiler(vendor, root, environment),
    )


def _compiler(vendor: Vendor, root: Path, environment: Mapping[str, str]) -> str:
    on_path = environment.get("CUDACXX", "") if vendor is NVIDIA else ""
    compiler = shutil.which(on_path or vendor.compiler, path=environment.get("PATH", ""))
    if compiler:
        return compiler
    named = [Path(environment[name]) for name in vendor.variables if environment.get(name)]
    usual = [folder for pattern in vendor.folders for folder in sorted(root.glob(pattern), key=_version, reverse=True)]
    for folder in (*named, *usual):
        if os.access(folder / "bin" / vendor.compiler, os.X_OK):
            return str(folder / "bin" / vendor.compiler)
    return ""


def _version(folder: Path) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", folder.name)]


def _is_plugged_in(vendor: Vendor, root: Path) -> bool:
    for device in root.glob("sys/bus/pci/devices/*"):
        if _text(device / "vendor") == vendor.pci_id and _text(device / "class").startswith(DISPLAY_CLASS):
            return True
    return False


def _names(root: Path) -> tuple[str, ...]:
    texts = [_text(path) for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information"))]
    return tuple(match[1].strip() for text in texts if (match := re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):  # not there, or not for this user
        return ""


def main(arguments: list[str]) -> None:
    """Print the choice and the compilers for build_llama.sh."""
    vulkan_version, vulkan_problem, *root = arguments
    gpus = look(Path(root[0])) if root else look()
    choice = choose(gpus, vulkan_version=vulkan_version, vulkan_problem=vulkan_problem)
    print(choice.backend, choice.reason, choice.hint, *(of_vendor.compiler for of_vendor in gpus), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
