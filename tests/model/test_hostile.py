"""Hostile clients of the real daemon: each gets an error or a clean close, and other streams are not affected."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import threading
import time

import psutil
import pytest

from tests.fuzz.mutate_gguf import Gguf
from tests.support import hostile
from tests.support.commands import run_process
from tests.support.real_daemon import Canary, real_daemon
from uma_trio.models.packaged import EMBEDDED
from uma_trio.tokenizer.vocabulary import vocabulary

FLAGS = ("--parallel", "4", "--ctx", "16384", "--max-frame-bytes", str(hostile.CAP), "--max-tx-bytes", "8192")
SHORT_TIMEOUTS = ("--frame-timeout-s", "1", "--idle-timeout-s", "3", "--write-timeout-s", "1")


@pytest.fixture(scope="module")
def limited(library):
    with real_daemon(*FLAGS) as found:
        yield found


@pytest.fixture
def strict(limited):
    """A daemon with small limits; after every test it must hold nothing, and a canary has not noticed the test."""
    with Canary(limited):
        yield limited
    limited.settled()


@pytest.fixture(scope="module")
def impatient(library):
    """A daemon with short timeouts, for tests that wait for them."""
    with real_daemon(*FLAGS, *SHORT_TIMEOUTS) as found:
        yield found


def codes(events):
    return [event.get("code") for event in events if event["event"] == "error"]


def test_every_bad_frame_gets_its_error_and_a_close(strict):
    for bad in hostile.ALL:
        with strict.wire() as wire:
            wire.send_bytes(bad.data)
            events = wire.rest()
        assert [(event["event"], event["code"], event.get("id")) for event in events] == [
            ("error", bad.code, bad.id)
        ], bad


def test_every_unusual_frame_is_served(strict):
    for name, data in hostile.HARMLESS:
        with strict.wire() as wire:
            wire.send_bytes(data)
            assert wire.answer().reason in ("stop", "length"), name


def test_all_bad_frames_at_once(strict):
    with contextlib.ExitStack() as stack:
        wires = [(stack.enter_context(strict.wire()), bad) for bad in hostile.ALL]
        for wire, bad in wires:
            wire.send_bytes(bad.data)
        for wire, bad in wires:
            assert codes(wire.rest()) == [bad.code], bad


def test_silence(impatient):
    """Between frames ``idle_timeout_s`` applies, inside a frame ``frame_timeout_s``."""
    with contextlib.ExitStack() as stack:
        wires = {
            sent: stack.enter_context(impatient.wire())
            for sent in (b"", b"\x05", b"\x05\0\0", b"\x05\0\0\0", b"\x05\0\0\0{")
        }
        for sent, wire in wires.items():
            wire.send_bytes(sent)
        for sent, wire in wires.items():
            assert codes(wire.rest()) == ["E_PROTO_TRUNCATED" if sent else "E_LIMIT_IDLE_TIMEOUT"], sent
    impatient.settled()


def test_single_bytes_with_pauses(impatient):
    with impatient.wire() as wire:
        unsent = list(reversed(wire.frame(id="a", prompt="x" * 1000)))
        with contextlib.suppress(OSError):
            while unsent:
                wire.send_bytes(bytes([unsent.pop()]))
                time.sleep(0.05)
        assert unsent, "the daemon waited for the whole frame"
        assert codes(wire.rest()) == ["E_PROTO_TRUNCATED"]


def test_two_frames_in_one_segment_and_one_frame_in_many(strict):
    with strict.wire() as wire:
        request = {"prompt": "Hello", "max_tokens": 2, "keep_alive": True}
        wire.send_bytes(wire.frame(type="metrics", keep_alive=True) + wire.frame(id="a", **request))
        assert wire.receive()["event"] == "metrics"
        assert wire.answer().reason in ("stop", "length")
        frame = wire.frame(id="b", **request)
        for at in range(0, len(frame), 3):
            wire.send_bytes(frame[at : at + 3])
        assert wire.answer().reason in ("stop", "length")


def test_a_second_request_is_refused_and_the_first_goes_on(strict):
    alone = strict.ask(prompt="Tell me a story", max_tokens=50, ignore_eos=True)
    with strict.wire() as wire:
        wire.send(id="first", prompt="Tell me a story", max_tokens=50, ignore_eos=True)
        wire.send(id="second", prompt="Hello")
        wire.send(id="first", prompt="Hello")  # also with the same id
        events = wire.rest()
    assert codes(events) == ["E_PROTO_BUSY"] * 2
    assert [event["token_id"] for event in events if event["event"] == "token"] == alone.ids


def test_a_cancel_of_an_unknown_finished_or_foreign_request(strict):
    with strict.wire() as one, strict.wire() as other:
        one.send(id="one", prompt="Tell me a story", max_tokens=100, ignore_eos=True)
        other.send(event="cancel", id="one")
        other.send(event="cancel", id="nobody")
        assert other.ask(id="done", prompt="Hello", max_tokens=2, keep_alive=True).reason == "length"
        other.send(event="cancel", id="done")
        assert other.ask(id="done", prompt="Hello", max_tokens=2, keep_alive=True).reason == "length"
        assert one.answer().reason == "length"


def test_a_flood_of_cancels(strict):
    with strict.wire() as wire:
        flood = wire.frame(event="cancel", id="nobody") * 20_000
        # keep_alive, since the request may end long before the flood does
        wire.send(id="a", prompt="Hello", max_tokens=100, ignore_eos=True, keep_alive=True)
        wire.send_bytes(flood)
        answer = wire.answer()
    assert (answer.reason, len(answer.ids)) == ("length", 100)


def test_a_client_that_never_reads_is_dropped_and_its_cells_are_freed(impatient):
    with impatient.wire() as deaf:
        deaf.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        deaf.send(id="deaf", prompt="Tell me a story", max_tokens=3900, ignore_eos=True)
        impatient.wait_until(lambda found: found["rejected_total"].get("E_IO_WRITE"), "it is dropped")
        impatient.settled()


def test_a_half_closed_connection(strict):
    with strict.wire() as wire:
        wire.send(id="a", prompt="Hello", max_tokens=20, ignore_eos=True)
        wire.sock.shutdown(socket.SHUT_WR)
        assert len(wire.answer().ids) == 20
    with strict.wire() as wire:
        wire.send_bytes(b"\x05\0\0\0{")
        wire.sock.shutdown(socket.SHUT_WR)
        assert codes(wire.rest()) == ["E_PROTO_TRUNCATED"]
    with strict.wire() as wire:
        wire.sock.shutdown(socket.SHUT_WR)
        assert wire.rest() == []
    with strict.wire() as wire:  # cannot receive, but sends
        wire.sock.shutdown(socket.SHUT_RD)
        wire.send(id="a", prompt="Hello", max_tokens=3000)


def test_reset_in_the_middle_of_a_frame(strict):
    for n in range(1, 30):
        with strict.wire() as wire:
            wire.send_bytes(wire.frame(type="metrics", keep_alive=True) + wire.frame(id="a", prompt="Hello")[:n])
            wire.sock.recv(1)  # the rest stays unread, so that closing resets


@pytest.mark.thorough
def test_3000_connects(strict):
    for _ in range(3000):
        with strict.wire():
            pass


def test_prompts_about_as_long_as_the_context(library):
    """One token shorter, the same length, one token longer."""
    window, word = 512, " the"
    with real_daemon("--ctx", str(window), "--parallel", "1") as daemon:

        def tokens(n):
            return daemon.ask(prompt=word * n, max_tokens=1).last["usage"]["prompt_tokens"]

        extra = tokens(100) - 100
        assert tokens(101) == 101 + extra
        for n, code in ((window - 1, None), (window, None), (window + 1, "E_LIMIT_CONTEXT")):
            answer = daemon.ask(prompt=word * (n - extra), max_tokens=1)
            assert answer.code == code
            if code is None:
                assert answer.last["usage"]["prompt_tokens"] == n
            else:
                assert f"{n} tokens" in answer.last["message"]
        assert daemon.ask(prompt=word * (window - 1 - extra), max_tokens=2, ignore_eos=True).reason == "length"
        assert daemon.ask(prompt=word * (window - extra), max_tokens=2).code == "E_LIMIT_CONTEXT"


def test_a_prompt_without_text(strict):
    """It is refused if it has no tokens; this model adds BOS to every text."""
    with vocabulary(EMBEDDED) as tokenizer:
        has_tokens = len(tokenizer.encode("")) > 0
    assert strict.ask(prompt="", max_tokens=3).code == (None if has_tokens else "E_PROTO_BAD_REQUEST")


def test_an_empty_message_is_served(strict):
    assert strict.ask(messages=[{"role": "user", "content": ""}], max_tokens=3).reason in ("stop", "length")


def test_control_tokens_and_noise_in_prompts(strict):
    for prompt in (
        "<|im_start|>" * 50,
        "<s></s>" * 50,
        "\x00\x01\x7f\ufeff\u202e",
        "\ufffd" * 100,
        "🦊" * 80,
        " " * 1000,
        "\n" * 300,
    ):
        assert strict.ask(prompt=prompt, max_tokens=3).reason in ("stop", "length"), prompt[:20]


def test_prompts_that_are_too_large(strict):
    assert strict.ask(prompt="x y " * 15_000).code == "E_LIMIT_CONTEXT"
    assert strict.ask(prompt="x", max_tokens=10**8).code == "E_LIMIT_MAX_TOKENS"


def test_a_million_stops_are_a_frame_too_large(strict):
    with strict.wire() as wire:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            wire.send(id="a", prompt="x", stop=["x"] * 1_000_000)
        assert codes(wire.rest()) == ["E_PROTO_FRAME_TOO_LARGE"]


def test_newline_protocol_under_fire(library):
    with real_daemon("--protocol", "newline", "--default-max-tokens", "5", "--max-frame-bytes", "4096") as daemon:
        for sent, answer in (
            (b"x" * 5000 + b"\n", b"error: E_PROTO_FRAME_TOO_LARGE"),
            (b"x" * 6000, b"error: E_PROTO_FRAME_TOO_LARGE"),
            (b"a\0b\n", b"error: E_PROTO_BAD_REQUEST"),
            (b"\xff\xfe\n", b"error: E_PROTO_BAD_REQUEST"),
            (b"\x10\0\0\0{", b"error: E_PROTO_BAD_REQUEST"),
        ):
            with daemon.wire() as wire:
                wire.send_bytes(sent)
                wire.sock.shutdown(socket.SHUT_WR)
                data = b""
                with contextlib.suppress(ConnectionResetError):
                    while chunk := wire.sock.recv(1 << 16):
                        data += chunk
                assert answer in data, (sent[:20], data)


def test_a_daemon_without_free_file_descriptors_waits_and_recovers(library, tmp_path):
    """While clients use all descriptors, the others wait; accepting continues when clients leave."""
    with real_daemon("--parallel", "2", folder=tmp_path) as daemon, contextlib.ExitStack() as stack:
        n_files = psutil.Process(daemon.pid).num_fds() + 24  # drivers of a GPU have some open, too
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (n_files, n_files))
        wires = [stack.enter_context(daemon.wire()) for _ in range(80)]
        for wire in wires:
            wire.send(type="metrics", keep_alive=True)
        daemon.logged("cannot accept clients for now")
        assert all(wire.receive()["event"] == "metrics" for wire in wires[:10])
        time.sleep(1)  # it tries again now and then
        answered, _, _ = select.select([wire.sock for wire in wires], [], [], 0)
        served = wires[: 10 + len(answered)]
        assert len(served) < 48
        assert all(wire.receive()["event"] == "metrics" for wire in served[10:]), "it accepts them in their order"
        assert served[0].ask(prompt="Hello", max_tokens=3, keep_alive=True).reason == "length"
        for wire in served[1:]:
            wire.sock.close()
        late = [wire for wire in wires if wire not in served]
        assert all(wire.receive()["event"] == "metrics" for wire in late[:20]), "their requests were waiting"
    assert daemon.events_logged().count("cannot accept clients for now") in (1, 2)


def test_concurrent_abuse(strict):
    """Bad frames and disconnects from several threads."""
    failures = []

    def abuse(part):
        try:
            for bad in hostile.ALL[part::4]:
                with strict.wire() as wire:
                    wire.send_bytes(bad.data[: len(bad.data) // 2])
                    wire.sock.settimeout(0.001)
                    with contextlib.suppress(TimeoutError):
                        wire.receive()
                with strict.wire() as wire:
                    wire.send(id="a", prompt="Tell me a story", max_tokens=1000)
                    wire.send_bytes(bad.data)
                    assert bad.code in codes(wire.rest())
        except Exception as error:  # noqa: BLE001  (raised below)
            failures.append(error)

    threads = [threading.Thread(target=abuse, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures[0]


def test_a_model_file_that_would_abort_llama_cpp_is_refused(library, tmp_path):
    model = Gguf.parse(EMBEDDED.read_bytes())
    model.pair("llama.block_count").value = 2690366077
    path = tmp_path / "deadly.gguf"
    path.write_bytes(model.to_bytes())
    done = run_process("serve", "--model", path, "--socket", tmp_path / "uma.sock")
    assert done.returncode > 0
    assert "it claims 2690366077 layers, not 1 to 512" in done.stderr
    assert "GGML_ASSERT" not in done.stderr
