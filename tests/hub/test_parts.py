"""Models in several files, and the folders of LM Studio."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import attrs
import gguf
import pytest

from tests.support.bench_scripts import bench_script
from tests.support.hub_server import FakeHub, Fault
from tests.support.model_home import Home
from tests.support.real_daemon import missing, real_daemon
from uma_trio.models.gguf_check import GgufError, check_gguf
from uma_trio.models.packaged import EMBEDDED

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The embedded model in several files, written by ggml's own library."""
    folder = tmp_path_factory.mktemp("parts")
    source = gguf.GGUFReader(EMBEDDED)
    n_tensors = len(source.tensors)
    writer = gguf.GGUFWriter(
        folder / "Tiny-Q8_0.gguf",
        source.fields["general.architecture"].contents(),
        split_max_tensors=n_tensors // 3 + 1,
    )
    bench_script("gguf_file").copy_fields(source, writer)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    bench_script("gguf_file").write_to_end(writer)
    return sorted(folder.iterdir())


def test_all_parts_are_checked(parts: list[Path], tmp_path: Path) -> None:
    whole = check_gguf(EMBEDDED)
    assert [part.name for part in parts] == [f"Tiny-Q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    found = check_gguf(parts[0])
    assert attrs.evolve(found, size_bytes=0) == attrs.evolve(whole, size_bytes=0), "memory is counted over all parts"
    assert found.size_bytes == sum(part.stat().st_size for part in parts)
    copies = [Path(shutil.copy(part, tmp_path)) for part in parts]
    with pytest.raises(GgufError, match=r"it is part 2 of 3; give the first one: Tiny-Q8_0-00001-of-00003.gguf"):
        check_gguf(copies[1])
    shutil.copy(parts[2], copies[1])
    with pytest.raises(GgufError, match=r"00002-of-00003.gguf: it is not part 2 of 3"):
        check_gguf(copies[0])
    copies[1].write_bytes(parts[1].read_bytes()[:-100])
    with pytest.raises(GgufError, match=r"00002-of-00003.gguf: its tensors need .*cut off"):
        check_gguf(copies[0])
    copies[1].unlink()
    with pytest.raises(GgufError, match=r"1 of its 3 parts are missing, the first one Tiny-Q8_0-00002-of-00003.gguf"):
        check_gguf(copies[0])


@pytest.mark.thorough
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_a_model_in_parts_is_pulled_and_served(hub: FakeHub, home: Home, parts: list[Path], tmp_path: Path) -> None:
    hub.add("acme/Parts-GGUF", {f"Q8_0/{part.name}": part.read_bytes() for part in parts})
    hub.faults.extend([Fault(cut_after=1_000_000), Fault(), Fault(cut_after=1_000_000)])
    pulled = home.run("pull", "acme/Parts-GGUF")
    assert pulled.returncode == 0, pulled.stderr
    folder = "hub/acme/Parts-GGUF/Q8_0"
    assert home.files() == sorted([*(f"{folder}/{part.name}" for part in parts), f"{folder}/{parts[0].name}.json"])
    assert [(home.models / folder / part.name).read_bytes() for part in parts] == [part.read_bytes() for part in parts]
    with real_daemon("--model", "parts:q8_0", folder=tmp_path, environment=home.environment) as daemon:
        assert "Paris" in daemon.ask(messages=QUESTION, model="acme/Parts-GGUF:Q8_0").text
    assert home.run("models", "remove", "--yes", "parts").returncode == 0
    assert home.files() == []


def test_the_parts_of_another_server(hub: FakeHub, home: Home, parts: list[Path]) -> None:
    for part in parts:
        hub.plain[f"/m/{part.name}"] = part.read_bytes()
    pulled = home.run("pull", f"{hub.files_url}/m/{parts[1].name}", "--json")
    assert pulled.returncode == 0, pulled.stderr
    assert json.loads(pulled.stdout)["name"] == "Tiny-Q8_0"
    assert len([name for name in home.files() if name.endswith(".gguf")]) == 3


def test_a_model_of_lm_studio_is_used_where_it_is(hub: FakeHub, home: Home, model: bytes) -> None:
    folder = home.folder / "elsewhere" / "models" / "acme" / "Tiny-GGUF"
    folder.mkdir(parents=True)
    (folder / "Tiny-Q8_0.gguf").write_bytes(model)
    (folder / "mmproj-Tiny-F16.gguf").write_bytes(b"not a language model")
    (home.folder / ".lmstudio-home-pointer").write_text(str(home.folder / "elsewhere"))
    (listed,) = home.listed()
    assert (listed["name"], listed["origin"]) == ("acme/Tiny-GGUF:Q8_0", "LM Studio")
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    pulled = json.loads(home.run("pull", "acme/Tiny-GGUF", "--json").stdout)
    assert pulled["path"] == str(folder / "Tiny-Q8_0.gguf")
    assert hub.file_requests() == []
    assert json.loads(home.run("models", "show", "tiny", "--json").stdout)["architecture"] == "llama"
