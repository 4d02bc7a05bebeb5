"""Downloads from servers and over connections that fail, lie or stop: the right file, or none and the reason."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest

from tests.support.hub_server import FakeHub, Fault
from tests.support.model_home import Home
from tests.support.profile import sampled
from tests.support.real_daemon import ROOT
from uma_trio.hub.download import PullReporter
from uma_trio.hub.environment import ModelLocations
from uma_trio.hub.errors import HubError
from uma_trio.hub.folder import InstalledModel
from uma_trio.hub.http import Delays
from uma_trio.hub.names import HubReference, UrlReference, parse
from uma_trio.hub.pull import Puller

NAME = "acme/Tiny-GGUF:Q8_0"
FILE = "hub/acme/Tiny-GGUF/Tiny-Q8_0.gguf"
EVENT_S = 60.0


class Recorder(PullReporter):
    """Keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def start(self, name: str, sizes: Sequence[int | None]) -> None: ...
    def progress(self, number: int, done: int, size: int | None) -> None: ...
    def message(self, text: str) -> None:
        self.messages.append(text)


@attrs.frozen
class Machine:
    """A folder of models, and pulls into it within this process."""

    places: ModelLocations
    reporter: Recorder = attrs.field(factory=Recorder)

    async def pull(self, text: str, sha256: str | None = None) -> InstalledModel:
        reference = parse(text, self.places.endpoint)
        assert isinstance(reference, HubReference | UrlReference)
        puller = Puller(
            self.places, self.reporter, delays=Delays(attempts=4, first_s=0, longest_s=0), silence_s=EVENT_S
        )
        return await puller.pull(reference, sha256)

    def files(self) -> list[str]:
        root = self.places.folder
        return sorted(each.relative_to(root).as_posix() for each in root.rglob("*") if each.is_file())


@pytest.fixture
def machine(hub: FakeHub, tmp_path: Path) -> Machine:
    return Machine(ModelLocations(folder=tmp_path / "models", endpoint=hub.url))


@pytest.fixture
def tiny(hub: FakeHub, model: bytes) -> bytes:
    hub.add("acme/Tiny-GGUF", {"Tiny-Q8_0.gguf": model})
    return model


CUT = Fault(cut_after=1_000_000)

SURVIVED = {
    "a range from another byte": [CUT, Fault(headers={"content-range": "bytes 7-99/100"})],
    "a range without saying which": [CUT, Fault(headers={"content-range": ""})],
    "a range of a file of another size": [CUT, Fault(headers={"content-range": "bytes 1000000-2000000/3000000"})],
    "the whole file instead of the rest": [CUT, Fault(ignores_range=True)],
    "busy, then fine": [Fault(status=503, headers={"retry-after": "0"}), Fault(status=429), CUT, Fault(status=500)],
    "cut before the first byte": [Fault(cut_after=0), Fault(cut_after=0)],
    "a shorter length": [Fault(headers={"content-length": "5000"})],
    "a longer length": [Fault(headers={"content-length": "99999999999"})],
    "compressed, it says": [Fault(headers={"content-encoding": "gzip"})],
    "damaged before a cut": [Fault(cut_after=1_000_000, change=lambda body: b"x" + body[1:])],
}


@pytest.mark.parametrize("faults", sampled(SURVIVED.values(), 3), ids=SURVIVED)
async def test_what_a_download_survives(hub: FakeHub, machine: Machine, tiny: bytes, faults: list[Fault]) -> None:
    hub.faults.extend(faults)
    found = await machine.pull(NAME)
    assert found.path.read_bytes() == tiny
    assert not hub.faults
    assert machine.files() == [FILE, f"{FILE}.json"]


REFUSED = {
    "damaged": ([Fault(change=lambda body: body[:-1] + b"x")], "arrived damaged: its SHA-256 is"),
    "gone": ([Fault(status=404)], "the status 404"),
    "forbidden": ([Fault(status=403)], "needs a login"),
    "busy for ever": ([Fault(status=503)] * 5, "the status 503, 4 times in a row"),
    "a redirect to what is not encrypted": ([Fault(redirect="http://example.com/x")], "not encrypted"),
    "a redirect to a file": ([Fault(redirect="file:///etc/passwd")], "not a URL of a web server"),
    "redirects in a circle": ([Fault(redirect="/{same}")] * 20, "redirects more than 10 times"),
}


@pytest.mark.parametrize(("faults", "reason"), REFUSED.values(), ids=REFUSED)
async def test_what_is_refused_leaves_nothing(
    hub: FakeHub, machine: Machine, tiny: bytes, faults: list[Fault], reason: str
) -> None:
    same = f"{hashlib.sha256(tiny).hexdigest()}/acme/Tiny-GGUF/Tiny-Q8_0.gguf"
    hub.faults.extend(
        attrs.evolve(fault, redirect=fault.redirect.format(same=same)) if fault.redirect else fault for fault in faults
    )
    with pytest.raises(HubError, match=reason) as raised:
        await machine.pull(NAME)
    assert raised.value.remedy
    assert machine.files() == []


def answer(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", b"content-length: %d" % len(body), *headers, b"", body])


NO_HUB = {
    "brackets without end": (answer(b"[" * 1_000_000), "does not answer as a hub does"),
    "brackets in a refusal": (answer(b"[" * 1_000_000).replace(b"200 OK", b"404 No"), "there is no repository"),
    "objects without end": (answer(b'{"siblings":' * 100_000), "does not answer as a hub does"),
    "a page": (answer(b"<html>"), "does not answer as a hub does"),
    "no text": (answer(b"\xff\x00"), "does not answer as a hub does"),
    "a number": (answer(b"1e999"), "does not answer as a hub does"),
    "files that are none": (answer(b'{"siblings": [1, null, {"rfilename": 3}, []]}'), "no GGUF"),
    "a size that no file has": (
        answer(b'{"siblings": [{"rfilename": "Tiny-Q8_0.gguf", "size": 1%s}]}' % (b"0" * 30)),
        "needs a login",
    ),
    "another protocol": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "does not answer as an HTTP server does"),
    "a header that is none": (answer(b"{}", b"\x00\x01"), "does not answer as an HTTP server does"),
}


@pytest.mark.parametrize(("sent", "reason"), NO_HUB.values(), ids=NO_HUB)
async def test_what_is_no_answer_of_a_hub_is_one_error(
    hub: FakeHub, machine: Machine, sent: bytes, reason: str
) -> None:
    hub.hub_faults.append(Fault(raw=sent))
    with pytest.raises(HubError, match=reason) as raised:
        await machine.pull(NAME)
    assert raised.value.remedy
    assert machine.reporter.messages == []
    assert machine.files() == []


async def test_a_connection_that_is_refused_is_not_tried_again(tmp_path: Path) -> None:
    with socket.socket() as nobody:  # bound, and not listening
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        machine = Machine(ModelLocations(folder=tmp_path / "models", endpoint=url))
        with pytest.raises(HubError, match=r"cannot connect to 127\.0\.0\.1: .* \(Connection refused\)") as raised:
            await machine.pull(NAME)
    assert "HF_ENDPOINT another hub" in raised.value.remedy
    assert machine.reporter.messages == []


async def test_a_hub_that_is_busy_is_asked_again_and_each_wait_is_said(
    hub: FakeHub, machine: Machine, tiny: bytes
) -> None:
    hub.hub_faults.extend([Fault(status=503), Fault(status=500)])
    assert (await machine.pull(NAME)).path.read_bytes() == tiny
    first, second = machine.reporter.messages
    assert "the status 503; trying again" in first
    assert "the status 500; trying again" in second


async def test_a_file_that_is_no_model_is_refused_and_removed(hub: FakeHub, machine: Machine, model: bytes) -> None:
    hub.add("acme/Bad-GGUF", {"Bad-Q8_0.gguf": model[: len(model) // 2], "Bad-Q4_0.gguf": b"<html>" * 1000})
    with pytest.raises(HubError, match=r"acme/Bad-GGUF:Q8_0 is refused: .*cut off"):
        await machine.pull("acme/Bad-GGUF:Q8_0")
    with pytest.raises(HubError, match="is refused: it is not a GGUF file: it begins with <htm,"):
        await machine.pull("acme/Bad-GGUF:Q4_0")
    assert machine.files() == []


async def test_the_token_goes_to_the_hub_alone(hub: FakeHub, machine: Machine, model: bytes) -> None:
    hub.add("acme/Private-GGUF", {"P-Q8_0.gguf": model}, is_private=True)
    hub.add("acme/Gated-GGUF", {"G-Q8_0.gguf": model}, is_gated=True)
    with pytest.raises(HubError, match="there is no repository acme/Private-GGUF") as raised:
        await machine.pull("acme/Private-GGUF")
    assert "HF_TOKEN" in raised.value.remedy
    with pytest.raises(HubError, match="is gated") as raised:
        await machine.pull("acme/Gated-GGUF")
    assert f"accept its conditions at {hub.url}/acme/Gated-GGUF" in raised.value.remedy
    known = Machine(attrs.evolve(machine.places, token="hf_secret"))
    for name in ("acme/Private-GGUF", "acme/Gated-GGUF"):
        assert (await known.pull(name)).path.read_bytes() == model
    assert {request.server for request in hub.requests if "authorization" in request.headers} == {"hub"}
    assert hub.file_requests()


async def test_what_is_not_there_is_named(hub: FakeHub, machine: Machine, tiny: bytes) -> None:
    with pytest.raises(HubError, match="there is no repository acme/Tiny at") as raised:
        await machine.pull("acme/Tiny")
    assert "repositories that are similar: acme/Tiny-GGUF" in raised.value.remedy
    with pytest.raises(HubError, match="acme/Tiny-GGUF has no Q2_K") as raised:
        await machine.pull("acme/Tiny-GGUF:Q2_K")
    assert "Q8_0 (7.3 MiB)" in raised.value.remedy
    with pytest.raises(HubError, match="has no revision old"):
        await machine.pull("acme/Tiny-GGUF@old")
    with pytest.raises(HubError, match="nothing is downloaded offline"):
        await Machine(attrs.evolve(machine.places, is_offline=True)).pull(NAME)


async def test_a_small_file_in_git_is_verified_as_git_does(hub: FakeHub, machine: Machine, model: bytes) -> None:
    hub.add("acme/Git-GGUF", {"G-Q8_0.gguf": model}, in_git=("G-Q8_0.gguf",))
    assert (await machine.pull("acme/Git-GGUF")).path.read_bytes() == model


# -- files of other servers -----------------------------------------------------------------------


async def test_a_file_of_another_server(hub: FakeHub, machine: Machine, model: bytes) -> None:
    hub.plain["/m/tiny.gguf"] = model
    hub.faults.extend([CUT, CUT])
    found = await machine.pull(f"{hub.files_url}/m/tiny.gguf?key=secret")
    assert found.path.read_bytes() == model
    assert (found.name, "secret" in str(found.source)) == ("tiny", False)
    assert [request.headers.get("if-range") is not None for request in hub.file_requests()] == [False, True, True]
    other = Machine(attrs.evolve(machine.places, folder=machine.places.folder / "other"))
    with pytest.raises(HubError, match="its SHA-256 is"):
        await other.pull(f"{hub.files_url}/m/tiny.gguf", "0" * 64)


async def test_a_file_that_changes_meanwhile_is_downloaded_again(hub: FakeHub, machine: Machine, model: bytes) -> None:
    other = model + bytes(32)
    hub.plain["/m/tiny.gguf"] = model

    def change(body: bytes) -> bytes:
        hub.plain["/m/tiny.gguf"] = other
        return body

    hub.faults.append(Fault(cut_after=1_000_000, change=change))
    assert (await machine.pull(f"{hub.files_url}/m/tiny.gguf")).path.read_bytes() == other


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
async def test_without_a_strong_etag_a_cut_download_begins_again(
    hub: FakeHub, machine: Machine, model: bytes, etag: str | None
) -> None:
    hub.plain["/m/tiny.gguf"] = model
    hub.etags["/m/tiny.gguf"] = etag
    hub.faults.append(CUT)
    assert (await machine.pull(f"{hub.files_url}/m/tiny.gguf")).path.read_bytes() == model
    assert not any("range" in request.headers for request in hub.file_requests())


# -- the disk -------------------------------------------------------------------------------------


async def test_a_full_disk_is_refused_before_the_first_byte(
    hub: FakeHub, machine: Machine, tiny: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma_trio.hub.partial.free_bytes", lambda folder: 18 << 20)
    with pytest.raises(HubError, match=r"the download needs 7\.3 MiB, and 18\.0 MiB are free") as raised:
        await machine.pull(NAME)
    assert raised.value.remedy.startswith("free 5.3 MiB")
    assert hub.file_requests() == []
    assert machine.files() == []


def test_a_disk_that_fills_up_keeps_what_is_here(hub: FakeHub, home: Home, tiny: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uma_trio", "pull", NAME],
        cwd=ROOT,
        env=home.environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "is full after 3.0 MiB of the file" in done.stderr
    assert "Traceback" not in done.stderr
    again = home.run("pull", NAME)
    assert again.returncode == 0, again.stderr
    assert hub.file_requests()[-1].headers["range"] == f"bytes={3 << 20}-"
    assert (home.models / FILE).read_bytes() == tiny


# -- several processes ----------------------------------------------------------------------------


def test_what_was_killed_goes_on(hub: FakeHub, home: Home, tiny: bytes) -> None:
    reached, go_on = threading.Event(), threading.Event()
    hub.faults.append(Fault(cut_after=5 << 20, hold=(reached, go_on)))
    process = home.start("pull", NAME)
    try:
        assert reached.wait(EVENT_S)
        wait_for_part(home, 4 << 20)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=EVENT_S)
    finally:
        go_on.set()
        process.kill()
    listed = home.run("models")
    assert re.search(rf"not complete: {NAME}, [45]\.", listed.stderr)
    assert home.run("pull", NAME).returncode == 0
    _, _, start = hub.file_requests()[-1].headers["range"].partition("=")
    assert int(start.rstrip("-")) >= 4 << 20
    assert (home.models / FILE).read_bytes() == tiny
    assert home.files() == [FILE, f"{FILE}.json"]


def test_two_pulls_of_one_model_share_one_download(hub: FakeHub, home: Home, tiny: bytes) -> None:
    reached, go_on = threading.Event(), threading.Event()
    hub.faults.append(Fault(cut_after=1 << 20, hold=(reached, go_on)))
    first = home.start("pull", NAME)
    try:
        assert reached.wait(EVENT_S)
        second = home.start("pull", NAME)
        try:
            assert second.stderr is not None
            assert "another process downloads" in second.stderr.readline()
            go_on.set()
            outputs = {process.communicate(timeout=EVENT_S)[0] for process in (first, second)}
        finally:
            second.kill()
    finally:
        go_on.set()
        first.kill()
    assert (first.returncode, second.returncode) == (0, 0)
    assert outputs == {f"{home.models / FILE}\n"}
    assert len(hub.file_requests()) == 1


def test_ctrl_c_says_how_to_go_on(hub: FakeHub, home: Home, tiny: bytes) -> None:
    reached, go_on = threading.Event(), threading.Event()
    hub.faults.append(Fault(cut_after=1 << 20, hold=(reached, go_on)))
    process = home.start("pull", NAME)
    try:
        assert reached.wait(EVENT_S)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=EVENT_S)
    finally:
        go_on.set()
        process.kill()
    assert process.returncode == 130
    assert f"uma-trio pull {NAME} resumes the download" in err
    removed = home.run("models", "remove", "--yes", NAME)
    assert removed.returncode == 0, removed.stderr
    assert home.files() == []


def wait_for_part(home: Home, size: int) -> None:
    """Wait until bytes are on disk; the test's own limit of time ends this."""
    folder = home.models / ".downloads"
    while sum(part.stat().st_size for part in folder.rglob("*.part")) < size:
        os.sched_yield()


# -- folders --------------------------------------------------------------------------------------


def test_removing_asks_and_deletes_what_is_ours_alone(hub: FakeHub, home: Home, tiny: bytes) -> None:
    assert home.run("pull", NAME).returncode == 0
    assert home.run("models", "remove", NAME).returncode == 1, "nobody answers"
    assert FILE in home.files()
    (home.models / "hub" / "note.txt").write_text("mine")
    assert home.run("models", "remove", "--yes", NAME).returncode == 0
    assert home.files() == ["hub/note.txt"]
