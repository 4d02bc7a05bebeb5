"""Two daemons between which sessions move."""

from __future__ import annotations

import contextlib
import shutil
import signal
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import httpx
import msgspec
import psutil
import pytest
import trustme

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import WAIT_S, free_port, missing, real_daemon
from uma_trio.config import Config, Http
from uma_trio.gateway.peers.messages import PATH, SIGNATURE, PeerQuestion
from uma_trio.gateway.peers.settings import PeerSettings
from uma_trio.gateway.peers.signatures import Signer

SECRET = "0123456789abcdef" * 4


@attrs.frozen
class Cluster:
    """Two daemons that are each other's peers, and one that is alone."""

    a: Gateway
    b: Gateway
    alone: Gateway


def key_file(folder: Path, secret: str = SECRET) -> Path:
    file = folder / "peers.key"
    file.write_text(secret)
    file.chmod(0o600)
    return file


@contextlib.contextmanager
def daemon_at(
    port: int, folder: Path, *peers: int, key: Path, flags: tuple[str, ...] = (), scheme: str = "http", **options: Any
) -> Iterator[Gateway]:
    urls = ",".join([f"{scheme}://127.0.0.1:{peer}" for peer in (port, *peers)])
    with real_daemon(
        *("--http", str(port), "--state-dir", str(folder / f"state-{port}"), "--parallel", "2", "--ctx", "8192"),
        *("--peers", urls, "--peers-key", str(key), *flags),
        **options,
    ) as daemon:
        yield Gateway.of(daemon)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cluster")
    key, (a, b) = key_file(folder), (free_port(), free_port())
    with (
        daemon_at(a, folder, b, key=key) as first,
        daemon_at(b, folder, a, key=key) as second,
        real_daemon("--http", "0", "--parallel", "2", "--ctx", "8192") as alone,
    ):
        yield Cluster(first, second, Gateway.of(alone))


def say(gateway: Gateway, session: str, text: str, **fields: Any) -> dict[str, Any]:
    """One turn of a session that the daemon remembers.

    On a busy machine a peer may be silent for too long; then it is repeated, as clients do.
    """
    body = {"session_id": session, "messages": [{"role": "user", "content": text}], "max_tokens": 24, "stream": False}
    until = time.monotonic() + WAIT_S
    with gateway.http() as client:
        while True:
            answer = client.post("/v1/generate", json={**body, "temperature": 0, **fields})
            if answer.status_code != 503 or time.monotonic() > until:
                break
            time.sleep(int(answer.headers["retry-after"]))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def names(gateway: Gateway) -> set[str]:
    with gateway.http() as client:
        return {each["session_id"] for each in client.get("/v1/sessions").json()["sessions"]}


TURNS = [
    "What is the capital of France?",
    "And of Italy?",
    "Tell me a story about a fox named Ada.",
    "Count from 1 to 10",
    "And of Spain?",
]


def test_a_session_follows_its_requests_and_its_texts_stay_the_same(cluster: Cluster) -> None:
    stayed = [say(cluster.alone, "trip", text)["text"] for text in TURNS]
    moved = [say((cluster.a, cluster.b)[n % 2], "trip", text) for n, text in enumerate(TURNS)]
    assert [each["text"] for each in moved] == stayed
    assert moved[-1]["session"]["turns"] == len(TURNS)
    assert moved[-1]["session"]["durable"]
    assert "trip" in names(cluster.a)
    assert "trip" not in names(cluster.b)


@pytest.mark.thorough
def test_the_kv_cache_of_a_long_session_moves_with_it(cluster: Cluster) -> None:
    text = "Here are some words: " + " ".join(f"the {n} red foxes and the {n * 7} blue hens" for n in range(150))
    first = say(cluster.a, "long", text)
    n_tokens = first["session"]["tokens"]
    assert n_tokens > 1500
    before = cluster.b.daemon.metrics()["prompt_tokens_total"]
    second = say(cluster.b, "long", "What is the capital of France?")
    prefilled = cluster.b.daemon.metrics()["prompt_tokens_total"] - before
    assert second["usage"]["prompt_tokens"] > n_tokens
    assert prefilled < 0.05 * n_tokens, "only what is new"
    stayed = [say(cluster.alone, "long", each)["text"] for each in (text, "What is the capital of France?")]
    assert [first["text"], second["text"]] == stayed


@pytest.mark.thorough
def test_a_disk_that_is_full_keeps_the_kv_cache_out_and_then_the_session(cluster: Cluster) -> None:
    text = "Here are some words: " + " ".join(f"the {n} grey foxes and the {n * 7} white hens" for n in range(150))
    n_tokens = say(cluster.a, "tight", text)["session"]["tokens"]
    [receiver] = [each for each in cluster.b.daemon.processes if "gateway: 1" in each.cmdline()[0]]
    try:
        receiver.rlimit(psutil.RLIMIT_FSIZE, (100_000, psutil.RLIM_INFINITY))  # its writes fail as on a full disk
        before = cluster.b.daemon.metrics()["prompt_tokens_total"]
        assert say(cluster.b, "tight", "And then?")["session"]["turns"] == 2
        assert cluster.b.daemon.metrics()["prompt_tokens_total"] - before > n_tokens, "the turns came without it"
        say(cluster.a, "tight", "And then?")
        receiver.rlimit(psutil.RLIMIT_FSIZE, (10, psutil.RLIM_INFINITY))
        body = {"session_id": "tight", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        with cluster.b.http() as client:
            assert client.post("/v1/generate", json=body).status_code == 503
    finally:
        receiver.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
    assert say(cluster.a, "tight", "And then?")["session"]["turns"] == 4


def test_the_old_holder_refuses_to_write_and_names_the_new_one(cluster: Cluster) -> None:
    say(cluster.a, "left", "Hello")
    say(cluster.b, "left", "Hello again")
    with cluster.a.daemon.wire() as wire:
        wire.send(id="w", session_id="left", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
        [refused] = wire.rest()
    assert refused["code"] == "E_SESSION_ELSEWHERE"
    assert cluster.b.url in refused["message"]


def test_a_session_that_was_found_here_stays_for_its_request(cluster: Cluster) -> None:
    """The gateway looks, and then sends the request: in between a peer would get it, and the client an error."""
    say(cluster.a, "found", "Hello")
    with cluster.a.daemon.wire() as found, cluster.a.daemon.wire() as peer:
        query = {"type": "lease", "session_id": "found", "keep_alive": True}
        for _ in range(2):
            found.send(**query, action="claim")
            assert (found.receive() or {})["state"] == "held"
        peer.send(**query, action="ask")
        assert (peer.receive() or {})["busy"]
        peer.send(**query, action="give", peer=cluster.b.url, seen=0, epoch=1)
        assert (peer.receive() or {})["code"] == "E_SESSION_BUSY"
        answer = found.ask(session_id="found", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
        assert answer.last["session"]["turns"] == 2
    assert say(cluster.b, "found", "Hello again")["session"]["turns"] == 3


def test_a_session_is_not_begun_where_nobody_can_ask(cluster: Cluster) -> None:
    with cluster.a.daemon.wire() as wire:
        wire.send(id="w", session_id="unknown", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
        [refused] = wire.rest()
    assert refused["code"] == "E_SESSION_ELSEWHERE"
    assert "over HTTP" in refused["message"]


def test_a_session_that_a_peer_has_is_read_renamed_forked_and_closed(cluster: Cluster) -> None:
    def ask(gateway: Gateway, action: str, session: str, **fields: Any) -> httpx.Response:
        with gateway.http() as client:
            return client.post(f"/v1/session/{action}", json={"session_id": session, **fields})

    say(cluster.a, "far", "Hello")
    say(cluster.a, "taken", "Hello")
    [user, reply] = ask(cluster.b, "read", "far").json()["messages"]
    assert (user["content"], reply["role"]) == ("Hello", "assistant")
    assert ask(cluster.a, "rename", "far", title="Near").json()["session"]["title"] == "Near"
    taken = ask(cluster.b, "fork", "far", new_id="taken")
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "E_SESSION_EXISTS"), "a peer had that name"
    assert ask(cluster.b, "fork", "far", new_id="copy").json()["session"]["title"] == "Near"
    assert say(cluster.a, "copy", "Hello again")["session"]["turns"] == 2
    assert say(cluster.a, "far", "Hello again")["session"]["turns"] == 2
    assert ask(cluster.b, "close", "far").json()["closed"]
    for gateway in (cluster.a, cluster.b):
        assert ask(gateway, "read", "far").status_code == 404
    assert say(cluster.a, "far", "Hello")["session"]["turns"] == 1, "begun anew"
    with cluster.a.daemon.wire() as wire:
        wire.send(type="sessions", action="fork", session_id="copy", new_id="unknown")
        assert (wire.receive() or {})["code"] == "E_SESSION_ELSEWHERE"


def test_only_peers_with_the_secret_get_an_answer(cluster: Cluster) -> None:
    question = {"action": "ask", "session_id": "trip"}
    with cluster.a.http() as client:
        for headers in ({}, {"x-uma-peer": "n.0"}, {"x-uma-peer": b"\xff.\xff"}):
            assert client.post("/v1/peer", json=question, headers=headers).status_code == 401
    with cluster.alone.http() as client:
        assert client.post("/v1/peer", json=question).status_code == 403


def asked(client: httpx.Client, stamp: str, action: str, session: str, **fields: Any) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of a peer's question."""
    question = PeerQuestion(action=action, session_id=session, to=str(client.base_url), stamp=stamp, **fields)
    body = msgspec.json.encode(question)
    return body, {SIGNATURE: Signer(SECRET.encode()).question(body)[1]}


def ask(client: httpx.Client, action: str, session: str, **fields: Any) -> httpx.Response:
    """Ask a daemon as a peer does."""
    body, headers = asked(client, "", action, session)
    stamp = client.post(PATH, content=body, headers=headers).json()["stamp"]
    body, headers = asked(client, stamp, action, session, **fields)
    answer = client.post(PATH, content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_question_that_is_repeated_gets_no_second_answer(cluster: Cluster) -> None:
    """Whoever has seen it on its way could otherwise read the session from a daemon that still has a copy."""
    with cluster.a.http() as client:
        assert ask(client, "ask", "trip").json()["state"] in ("held", "gone", "absent")
        body, headers = asked(client, "an old one", "ask", "trip")
        old = client.post(PATH, content=body, headers=headers)
        assert old.status_code == 425
        body, headers = asked(client, old.json()["stamp"], "ask", "trip")
        assert client.post(PATH, content=body, headers=headers).status_code == 200
        assert client.post(PATH, content=body, headers=headers).status_code == 401


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[tuple[Gateway, int, Path]]:
    """A daemon whose peer is not there yet: its port, and the key."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    key, (a, b) = key_file(tmp_path), (free_port(), free_port())
    with daemon_at(a, tmp_path, b, key=key) as first:
        yield first, b, key


@pytest.mark.thorough
def test_without_its_peer_a_daemon_begins_no_session_but_answers_whole_conversations(
    halves: tuple[Gateway, int, Path], tmp_path: Path
) -> None:
    gateway, port, key = halves
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": False, "session_id": "s"}
    with gateway.http() as client:
        refused = client.post("/v1/generate", json=body)
        whole = client.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "E_GATEWAY_PEER")
    assert int(refused.headers["retry-after"]) > 0
    assert f"http://127.0.0.1:{port}" in refused.json()["error"]["message"]
    assert whole.status_code == 200
    assert names(gateway) == set()
    with daemon_at(port, tmp_path, int(httpx.URL(gateway.url).port or 0), key=key) as second:
        assert say(gateway, "s", "Hi")["session"]["turns"] == 1
        assert say(second, "s", "Hi")["session"]["turns"] == 2


@pytest.mark.thorough
def test_a_peer_with_another_secret_counts_as_silent(halves: tuple[Gateway, int, Path], tmp_path: Path) -> None:
    gateway, port, _ = halves
    (tmp_path / "other").mkdir()
    other = key_file(tmp_path / "other", "f" * 64)
    with daemon_at(port, tmp_path, key=other), gateway.http() as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "session_id": "s"}
        assert client.post("/v1/generate", json=body).status_code == 503


@pytest.mark.thorough
def test_a_peer_whose_address_leads_to_another_daemon_counts_as_silent(
    halves: tuple[Gateway, int, Path], tmp_path: Path
) -> None:
    """Otherwise the session could begin here while the peer that holds it cannot be reached."""
    gateway, port, key = halves
    third = free_port()
    flags = ("--peer-url", f"http://127.0.0.1:{third}")
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "session_id": "s"}
    with daemon_at(port, tmp_path, key=key, flags=flags), gateway.http() as client:
        assert client.post("/v1/generate", json=body).status_code == 503


@pytest.mark.thorough
def test_two_daemons_that_look_for_the_same_session_at_once_both_find_it(cluster: Cluster) -> None:
    start = threading.Barrier(2)

    def turn(gateway: Gateway, session: str) -> int:
        body = {"session_id": session, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        with gateway.http() as client:
            start.wait(30)
            return client.post("/v1/generate", json={**body, "stream": False}, timeout=60).status_code

    with ThreadPoolExecutor(2) as threads:
        for n in range(12):
            answers = [threads.submit(turn, each, f"race-{n // 3}") for each in (cluster.a, cluster.b)]
            assert [answer.result() for answer in answers] == [200, 200]


@contextlib.contextmanager
def dripping(port: int) -> Iterator[None]:
    """A peer that answers with a byte now and then, and would take minutes."""

    class Drip(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.5)

    server = ThreadingHTTPServer(("127.0.0.1", port), Drip)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.socket.close()


def test_a_peer_that_answers_slowly_counts_as_silent(halves: tuple[Gateway, int, Path]) -> None:
    gateway, port, _ = halves
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": False, "session_id": "s"}
    with dripping(port), gateway.http() as client:
        refused = client.post("/v1/generate", json=body, timeout=60)
    assert refused.status_code == 503


@pytest.mark.thorough
def test_the_copy_stays_until_the_session_is_on_the_disk_of_its_new_holder(
    halves: tuple[Gateway, int, Path], tmp_path: Path
) -> None:
    gateway, port, key = halves
    own = int(gateway.url.rpartition(":")[2])
    with daemon_at(port, tmp_path, own, key=key) as taker:
        say(gateway, "kept", "Hello")
        [folder] = (tmp_path / f"state-{port}").glob("*/sessions")
        shutil.rmtree(folder)
        folder.touch()  # nothing can be written there
        assert not say(taker, "kept", "Hello again")["session"]["durable"]
        taker.daemon.signal(signal.SIGKILL)
        taker.daemon.wait()
    folder.unlink()
    with daemon_at(port, tmp_path, own, key=key):
        assert say(gateway, "kept", "Hello once more")["session"]["turns"] == 2


@pytest.mark.thorough
def test_a_session_that_cannot_be_copied_stays_where_it_is(halves: tuple[Gateway, int, Path], tmp_path: Path) -> None:
    gateway, port, key = halves
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": False, "session_id": "full"}
    with daemon_at(port, tmp_path, int(gateway.url.rpartition(":")[2]), key=key) as taker, taker.http() as client:
        say(gateway, "full", "Hello")
        (tmp_path / f"state-{port}" / "incoming").touch()
        refused = client.post("/v1/generate", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "E_GATEWAY_PEER")
        assert "incoming" in refused.json()["error"]["message"]
        assert "full" in names(gateway), "its copy is there, until somebody asks for it"
        assert client.post("/v1/chat/completions", json=body).status_code == 200, "it has the whole conversation"
        assert say(gateway, "full", "Hello again")["session"]["turns"] == 2


@pytest.mark.thorough
def test_a_session_moves_over_tls_and_never_to_a_peer_with_another_authority(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    key, (a, b) = key_file(tmp_path), (free_port(), free_port())
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    own.cert_chain_pems[0].write_to_path(tmp_path / "certificate.pem")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    flags = ("--tls-certificate", str(tmp_path / "certificate.pem"), "--tls-key", str(tmp_path / "key.pem"))
    body = {"session_id": "safe", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": False}

    def start(port: int, peer: int, trusted: trustme.CA) -> contextlib.AbstractContextManager[Gateway]:
        file = tmp_path / f"authority-{port}.pem"
        trusted.cert_pem.write_to_path(file)
        environment = {"SSL_CERT_FILE": str(file)}
        return daemon_at(port, tmp_path, peer, key=key, flags=flags, scheme="https", environment=environment)

    def turns(gateway: Gateway) -> tuple[int, int | None]:
        with gateway.http(verify=ssl.create_default_context(cafile=tmp_path / f"authority-{a}.pem")) as client:
            answer = client.post("/v1/generate", json=body)
        return answer.status_code, answer.json().get("session", {}).get("turns")

    with start(a, b, authority) as first:
        with start(b, a, authority) as second:
            assert [turns(each) for each in (first, second, first)] == [(200, 1), (200, 2), (200, 3)]
        with start(b, a, trustme.CA()) as stranger:
            assert turns(stranger) == (503, None)


def test_a_daemon_with_many_addresses_must_say_what_its_peers_call_it(tmp_path: Path) -> None:
    def own_url(**http: Any) -> str:
        found = PeerSettings.of(Config(http=Http(peers="http://10.0.0.2:80", peers_key=key_file(tmp_path), **http)))
        assert found is not None
        return found.own_url

    assert own_url(listen="127.0.0.1:80") == "http://127.0.0.1:80"
    assert own_url(listen="0.0.0.0:80", peer_url="https://a.example/") == "https://a.example"
    for listen in ("0.0.0.0:80", "[::]:80"):
        with pytest.raises(ValueError, match="needs --peer-url"):
            own_url(listen=listen)


def test_a_daemon_that_stops_hands_its_sessions_over(halves: tuple[Gateway, int, Path], tmp_path: Path) -> None:
    gateway, port, key = halves
    with daemon_at(port, tmp_path, int(gateway.url.rpartition(":")[2]), key=key) as stays:
        for n in range(3):
            say(gateway, f"s{n}", "Hello")
        gateway.daemon.signal(signal.SIGTERM)
        assert gateway.daemon.wait() == 0
        assert names(stays) == {"s0", "s1", "s2"}
        for n in range(3):
            assert say(stays, f"s{n}", "Hello again")["session"]["turns"] == 2


@pytest.mark.thorough
def test_a_daemon_that_stops_waits_until_a_peer_has_what_it_was_given(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with daemon_at(free_port(), tmp_path, key=key_file(tmp_path)) as gateway, gateway.http() as client:
        say(gateway, "s", "Hello")
        lease: dict[str, Any] = {"url": "http://127.0.0.1:1", "epoch": 1}
        [turns] = [each for each in ask(client, "give", "s", **lease).json()["files"] if each["kind"] == "turns"]
        gateway.daemon.signal(signal.SIGTERM)
        gateway.daemon.logged("sessions are moving: the daemon waits before it stops")
        assert client.get("/v1/sessions").status_code == 503, "it takes no other requests"
        assert len(ask(client, "read", "s", kind="turns", **lease).content) == turns["n_bytes"]
        assert ask(client, "confirm", "s", **lease).json()["state"] == "gone"
        assert gateway.daemon.wait() == 0


@pytest.mark.thorough
def test_a_peer_that_hangs_keeps_no_daemon_from_handing_its_sessions_over(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    key, ports = key_file(tmp_path), [free_port() for _ in range(3)]
    flags = ("--drain-hand-over-s", "60")
    with contextlib.ExitStack() as stack:
        leaves, hangs, stays = [
            stack.enter_context(
                daemon_at(port, tmp_path, *[each for each in ports if each != port], key=key, flags=flags)
            )
            for port in ports
        ]
        sessions = {f"s{n}" for n in range(5)}
        for name in sessions:
            say(leaves, name, "Hello")
        stopped = hangs.daemon.processes
        try:
            for process in stopped:
                process.suspend()
            leaves.daemon.signal(signal.SIGTERM)
            assert leaves.daemon.wait(2 * WAIT_S) == 0
            assert names(stays) == sessions
            stays.daemon.signal(signal.SIGTERM)  # nobody is left who answers
            assert stays.daemon.wait(2 * WAIT_S) == 0
        finally:
            for process in stopped:
                process.resume()


class Talker(threading.Thread):
    """A client with a session: asks one daemon after the other until one answers, as behind a router."""

    def __init__(self, name: str, urls: Sequence[str], ended: threading.Event) -> None:
        super().__init__()
        self.session, self.turns, self.known = name, 0, 0
        self.odd: list[str] = []
        """What no client should see."""
        self._urls, self._ended = deque(urls), ended

    def run(self) -> None:
        while not self._ended.is_set():
            self._urls.rotate(1)  # every turn goes elsewhere, which is the worst that a router can do
            until = time.monotonic() + 60
            while not self._ask():
                if time.monotonic() > until:
                    self.odd.append("no answer within a minute")
                    return
                self._urls.rotate(1)
                time.sleep(0.05)

    def _ask(self) -> bool:
        body = {"session_id": self.session, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        url = self._urls[0]
        try:
            if httpx.get(f"{url}/health", timeout=60).status_code != 200:
                return False
        except httpx.TransportError:  # it does not listen, or just stops to
            return False
        try:
            answer = httpx.post(f"{url}/v1/generate", json={**body, "stream": False}, timeout=60)
        except httpx.TransportError as error:
            self.odd.append(repr(error))
            return False
        if answer.status_code == 503 and "retry-after" in answer.headers:
            return False
        if answer.status_code != 200:
            self.odd.append(answer.text)
            return True
        self.turns += 1
        self.known = answer.json()["session"]["turns"]
        if self.known != self.turns:
            self.odd.append(f"{self.turns} answers, and the session has {self.known} turns")
        return True


@pytest.mark.thorough
def test_a_rolling_restart_under_load_loses_no_request_and_no_turn(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    key, ports, ended = key_file(tmp_path), (free_port(), free_port()), threading.Event()
    flags = ("--drain-notice-s", "2")

    def start(stack: contextlib.ExitStack, n: int) -> Gateway:
        return stack.enter_context(daemon_at(ports[n], tmp_path, ports[1 - n], key=key, flags=flags))

    with contextlib.ExitStack() as stack:
        gateways = [start(stack, n) for n in range(2)]
        talkers = [Talker(f"talk-{n}", [gateway.url for gateway in gateways], ended) for n in range(3)]
        try:
            for talker in talkers:
                talker.start()
            for n in range(2):
                time.sleep(2)
                gateways[n].daemon.signal(signal.SIGTERM)
                assert gateways[n].daemon.wait() == 0
                gateways[n] = start(stack, n)
            time.sleep(2)
        finally:
            ended.set()
            for talker in talkers:
                talker.join(90)
        assert [talker.odd for talker in talkers] == [[], [], []]
        assert all(talker.turns > 5 for talker in talkers)
        assert names(gateways[0]) | names(gateways[1]) == {talker.session for talker in talkers}
        assert not names(gateways[0]) & names(gateways[1]), "each session has one holder"
