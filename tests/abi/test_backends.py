"""Tests for backends that are plug-ins, and for the choice between libraries."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import uma_trio
from llama_abi import LibraryError, Stamp, backends, locations, remedies
from llama_abi import stamp as stamps
from llama_abi.check import find_compiler
from uma_trio.engine_link.installed import read_stamp

SCORED = "int ggml_backend_score(void) {{ return {score}; }}"
PLUG_IN = "-DGGML_BACKEND_DL=ON"
UNSCORED = "int ggml_backend_init(void) { return 0; }"


class FakeLibrary:
    """What ``load_backends`` needs of libllama; ``refused`` are files that it cannot load."""

    def __init__(self, refused: str = "") -> None:
        self.loaded: list[str] = []
        self.refused = refused

    def ggml_backend_load(self, path: bytes) -> int | None:
        name = Path(path.decode()).name
        if name == self.refused:
            return None
        self.loaded.append(name)
        return 1


def plugin(folder: Path, name: str, source: str) -> None:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [*find_compiler().split(), "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / name)],
        input=source,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "lib"
    plugin(place, "libggml-cpu-x64.so", SCORED.format(score=1))
    plugin(place, "libggml-cpu-icelake.so", SCORED.format(score=64))
    plugin(place, "libggml-cpu-sapphirerapids.so", SCORED.format(score=0))
    plugin(place, "libggml-rpc.so", UNSCORED)
    plugin(place, "libggml-base.so", UNSCORED)
    plugin(place, "libggml.so", UNSCORED)
    (place / "libggml-cpu-broken.so").write_bytes(b"\x7fELF")
    return place


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, and no library that build_llama.sh has built."""
    monkeypatch.delenv(locations.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr(locations, "DEFAULT_DIRECTORY", tmp_path / "llama_abi" / "lib")
    found = tmp_path / "site-packages"
    found.mkdir()
    monkeypatch.syspath_prepend(found)
    return found


def installed(packages: Path, name: str) -> Path:
    place = packages / name / "lib"
    place.mkdir(parents=True)
    (packages / name / "__init__.py").touch()
    return place.resolve()


@pytest.fixture
def vulkan(packages: Path) -> Path:
    return installed(packages, "uma_trio_llama_vulkan")


class TestBackends:
    def test_the_variant_with_the_best_score_is_loaded(self, folder: Path) -> None:
        library = FakeLibrary()
        assert backends.load_backends(library, folder).used == ("libggml-cpu-icelake.so", "libggml-rpc.so")
        assert library.loaded == ["libggml-cpu-icelake.so", "libggml-rpc.so"]

    def test_backends_of_other_wheels_come_first(self, folder: Path, vulkan: Path) -> None:
        plugin(vulkan, "libggml-vulkan.so", UNSCORED)
        stamps.write(vulkan, source=stamps.pin(), backend="vulkan", options=(PLUG_IN,))
        found = backends.load_backends(FakeLibrary(), folder)
        assert found.used[0] == "libggml-vulkan.so"
        assert found.backend == "vulkan"

    def test_one_that_is_installed_is_not_what_the_library_was_built_for(self, folder: Path, vulkan: Path) -> None:
        stamps.write(vulkan, source=stamps.pin(), backend="vulkan", options=(PLUG_IN,))
        stamps.write(folder, source=stamps.pin(), backend="cpu", options=(PLUG_IN,))
        found = read_stamp(folder)
        assert (found.backend, found.plugins) == ("cpu", ("vulkan",))

    def test_one_that_libggml_refuses_is_not_used(self, folder: Path, vulkan: Path) -> None:
        plugin(vulkan, "libggml-vulkan.so", UNSCORED)
        stamps.write(vulkan, source=stamps.pin(), backend="vulkan", options=(PLUG_IN,))
        found = backends.load_backends(FakeLibrary("libggml-vulkan.so"), folder)
        assert "libggml-vulkan.so" not in found.used
        assert found.unused == ("libggml-vulkan.so: it found no device",)
        assert found.backend == ""

    def test_one_whose_libraries_are_missing_is_not_used(self, folder: Path, vulkan: Path) -> None:
        """As a CUDA plug-in on a machine without a driver."""
        (vulkan / "libggml-vulkan.so").write_bytes(b"\x7fELF")
        stamps.write(vulkan, source=stamps.pin(), backend="vulkan", options=(PLUG_IN,))
        [unused] = backends.load_backends(FakeLibrary(), folder).unused
        assert "file too short" in unused

    def test_one_of_another_version_is_refused(self, folder: Path, vulkan: Path) -> None:
        plugin(vulkan, "libggml-vulkan.so", UNSCORED)
        stamps.write(vulkan, source="llama-cpp-python==0.0.1", backend="vulkan", options=(PLUG_IN,))
        with pytest.raises(LibraryError, match=r"but this version needs .*force-reinstall .* 'uma-trio\[vulkan\]'"):
            backends.load_backends(FakeLibrary(), folder)

    def test_a_cpu_that_no_variant_supports(self, folder: Path) -> None:
        for name in ("x64", "icelake"):
            (folder / f"libggml-cpu-{name}.so").unlink()
        with pytest.raises(LibraryError, match=r"no variant of the CPU backend in .* runs on this CPU; build"):
            backends.load_backends(FakeLibrary(), folder)


class TestWhichLibrary:
    def test_the_wheel_is_used_where_nothing_was_built(self, packages: Path) -> None:
        place = installed(packages, locations.WHEEL)
        assert locations.library_directory() == place

    def test_a_folder_that_an_uninstallation_has_left_is_no_plug_in(self, packages: Path) -> None:
        installed(packages, "uma_trio_llama_vulkan")
        (packages / "uma_trio_llama_vulkan" / "__init__.py").unlink()
        assert locations.plugin_folders() == []

    def test_a_built_library_comes_first(self, packages: Path) -> None:
        installed(packages, locations.WHEEL)
        locations.DEFAULT_DIRECTORY.mkdir(parents=True)
        (locations.DEFAULT_DIRECTORY / locations.STAMP).touch()
        assert locations.library_directory() == locations.DEFAULT_DIRECTORY

    def test_the_variable_comes_before_both(
        self, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        installed(packages, locations.WHEEL)
        monkeypatch.setenv(locations.DIRECTORY_VARIABLE, str(tmp_path / "own"))
        assert locations.library_directory() == tmp_path / "own"
        assert locations.library_directory(tmp_path / "named") == tmp_path / "named"

    def test_without_any_the_error_says_what_to_type(self, packages: Path) -> None:
        command = r"run pip install --find-links FOLDER 'uma-trio\[llama\]'"
        with pytest.raises(
            LibraryError, match=rf"no library in .*; {command}.*; or, in a checkout: \./build_llama\.sh$"
        ):
            Stamp.read(locations.library_directory())

    def test_in_a_checkout_it_is_built(self, packages: Path) -> None:
        locations.DEFAULT_DIRECTORY.parents[1].joinpath("build_llama.sh").touch()
        with pytest.raises(LibraryError, match=r"there is no library in .*; run \./build_llama\.sh$"):
            Stamp.read(locations.library_directory())

    def test_a_folder_that_nobody_can_build(self, packages: Path, tmp_path: Path) -> None:
        with pytest.raises(LibraryError, match=r"leave out --llama-dir, .*, and run pip install --find-links FOLDER "):
            Stamp.read(tmp_path / "own")

    def test_a_wheel_with_a_damaged_stamp(self, packages: Path) -> None:
        place = installed(packages, locations.WHEEL)
        (place / locations.STAMP).write_text("{}")
        with pytest.raises(LibraryError, match=r"; run pip install --upgrade --force-reinstall --find-links FOLDER "):
            Stamp.read(place)

    def test_what_only_a_build_repairs_names_the_checkout(self, packages: Path) -> None:
        assert remedies.build_command("--backend cpu") == "run ./build_llama.sh --backend cpu in a checkout of uma-trio"
        assert remedies.where_checkout("install it").endswith("in a checkout of uma-trio")

    def test_no_other_module_tells_people_to_build(self) -> None:
        """A remedy of its own would not know whether there is a checkout."""
        root = Path(__file__).parents[2]
        paths = [path for folder in ("llama_abi", "uma_trio") for path in (root / folder).rglob("*.py")]
        found = {
            path.relative_to(root).as_posix() for path in paths if "run ./build_llama.sh" in path.read_text().lower()
        }
        assert found == {
            "llama_abi/remedies.py",
            "llama_abi/wheels/make.py",  # is in a checkout only
            "uma_trio/cli/bench.py",  # needs a checkout anyway, and says how to get one
            "uma_trio/cli/doctor/environment.py",  # has found that it runs from a checkout
            "uma_trio/training/skills/about.py",
        }

    def test_a_wheel_of_another_version(self, packages: Path, directory: Path) -> None:
        place = installed(packages, locations.WHEEL)
        shutil.copytree(directory, place, dirs_exist_ok=True)
        path = place / locations.STAMP
        path.write_text(path.read_text().replace(stamps.pin(), "llama-cpp-python==0.0.1"))
        with pytest.raises(LibraryError, match=r"but this version needs .*; run pip install --upgrade --force-reinst"):
            Stamp.read(place).verify(place)


def test_python_knows_where_the_wheel_is_without_importing_it(packages: Path) -> None:
    place = installed(packages, locations.WHEEL)
    (place.parent / "__init__.py").write_text("raise ImportError\n")
    assert locations.folder_of_package(locations.WHEEL) == place
    assert locations.WHEEL not in sys.modules


def test_the_extra_requires_the_wheel_of_this_version() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    for extra, package in [("llama", locations.WHEEL), *((each.split("_")[-1], each) for each in locations.PLUGINS)]:
        wheel = package.replace("_", "-")
        assert project["project"]["optional-dependencies"][extra] == [f"{wheel}=={uma_trio.__version__}"]
