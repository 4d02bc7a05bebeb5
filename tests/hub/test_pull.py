"""``uma-trio pull`` as users run it, against a hub on this machine."""

from __future__ import annotations

from tests.support.hub_server import FakeHub, Fault
from tests.support.model_home import Home

NAME = "acme/Tiny-GGUF:Q8_0"
FILE = "hub/acme/Tiny-GGUF/Tiny-Q8_0.gguf"


def test_a_model_of_the_hub(hub: FakeHub, home: Home, model: bytes) -> None:
    hub.add("acme/Tiny-GGUF", {"README.md": b"# Tiny", "Tiny-Q8_0.gguf": model, "Tiny-F16.gguf": b"none"})
    pulled = home.run("pull", NAME)
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.strip() == str(home.models / FILE)
    assert (home.models / FILE).read_bytes() == model
    assert home.files() == [FILE, f"{FILE}.json"]
    (listed,) = home.listed()
    assert (listed["name"], listed["quantization"], listed["origin"]) == (NAME, "Q8_0", "uma-trio")
    n_requests = len(hub.file_requests())
    assert home.run("pull", NAME).returncode == 0
    assert len(hub.file_requests()) == n_requests, "it is here already"


def test_what_is_cut_20_times_ends_in_the_right_file(hub: FakeHub, home: Home, model: bytes) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    hub.faults.extend(Fault(cut_after=len(model) // 25 + number) for number in range(20))
    pulled = home.run("pull", NAME)
    assert pulled.returncode == 0, pulled.stderr
    assert not hub.faults
    assert len(hub.file_requests()) == 21
    assert (home.models / FILE).read_bytes() == model
    starts = [request.headers.get("range", "bytes=0-") for request in hub.file_requests()]
    assert len(set(starts)) == 21, "each goes on where the one before was cut"


def test_a_projector_comes_and_goes_with_its_model(hub: FakeHub, home: Home, model: bytes, projector: bytes) -> None:
    files = {"Tiny-Q8_0.gguf": model, "mmproj-Tiny-F16.gguf": projector, "mmproj-Tiny-F32.gguf": b"another"}
    hub.add("acme/Tiny-GGUF", files)
    pulled = home.run("pull", NAME)
    assert pulled.returncode == 0
    assert f"downloading {NAME}, " in pulled.stderr
    assert "downloading acme/Tiny-GGUF:mmproj-Tiny-F16.gguf, " in pulled.stderr
    sees = "hub/acme/Tiny-GGUF/mmproj-Tiny-F16.gguf"
    assert (home.models / sees).read_bytes() == projector
    assert home.files() == [FILE, f"{FILE}.json", sees, f"{sees}.json"]
    assert [each["name"] for each in home.listed()] == [NAME]
    n_requests = len(hub.file_requests())
    assert home.run("pull", NAME).returncode == 0
    assert len(hub.file_requests()) == n_requests, "both are here already"
    assert home.run("models", "remove", "--yes", NAME).returncode == 0
    assert home.files() == []


def test_a_model_comes_without_what_is_no_projector_of_it(hub: FakeHub, home: Home, model: bytes) -> None:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model, "mmproj-Tiny-F16.gguf": model})
    pulled = home.run("pull", NAME)
    assert pulled.returncode == 0
    assert "the model will not see pictures" in pulled.stderr
    assert "it is no projector, but a model" in pulled.stderr
    assert home.files() == [FILE, f"{FILE}.json"]
