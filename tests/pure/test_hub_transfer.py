"""What a server's answer means, which URLs may be opened, when to try again, and what is in the environment."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.hub.download import Body, Expected, WrongAnswer, read_answer, request_headers
from uma_trio.hub.environment import find_model_locations, read_token
from uma_trio.hub.errors import HubError
from uma_trio.hub.http import Delays
from uma_trio.hub.urls import origin_of, parse_url, redirected, without_secrets

STRONG = '"abc"'


def test_a_part_is_kept_only_if_a_change_would_be_noticed() -> None:
    assert request_headers(0, Expected(100, STRONG)) == {"Accept-Encoding": "identity"}
    assert request_headers(7, Expected(100, STRONG))["If-Range"] == STRONG
    assert "If-Range" not in request_headers(7, Expected(100, STRONG, has_hash=True))
    assert request_headers(7, Expected(100, None, has_hash=True))["Range"] == "bytes=7-"
    for etag in (None, 'W/"abc"', "abc", '""'):
        assert not Expected(100, etag).can_resume
        assert "Range" not in request_headers(7, Expected(100, etag))


@all_cases(
    ("status", "headers", "have", "expected", "body"),
    [
        (200, {"content-length": "100", "etag": STRONG}, 0, Expected(), Body(0, 100, 100, STRONG)),
        (200, {}, 0, Expected(100), Body(0, None, 100, None)),
        (200, {"content-length": "100"}, 40, Expected(100, STRONG), Body(0, 100, 100, None)),
        (206, {"content-range": "bytes 40-99/100"}, 40, Expected(100, None, True), Body(40, 60, 100, None)),
        (206, {"content-range": "bytes 40-59/*"}, 40, Expected(100, None, True), Body(40, 20, 100, None)),
        (416, {}, 100, Expected(100, STRONG), Body(100, 0, 100, None)),
    ],
)
def test_right_answers(status: int, headers: dict[str, str], have: int, expected: Expected, body: Body) -> None:
    assert read_answer(status, headers, have, expected) == body


@all_cases(
    ("status", "headers", "have"),
    [
        (200, {"content-length": "99"}, 0),
        (200, {"content-length": "-1"}, 0),
        (200, {"content-length": "1e3"}, 0),
        (200, {"content-encoding": "br"}, 0),
        (206, {"content-range": "bytes 0-99/100"}, 0),
        (206, {"content-range": "bytes 41-99/100"}, 40),
        (206, {"content-range": "bytes 40-100/100"}, 40),
        (206, {"content-range": "bytes 40-39/100"}, 40),
        (206, {"content-range": "bytes 40-99/101"}, 40),
        (206, {"content-range": "bytes 40-99/100", "content-length": "59"}, 40),
        (206, {"content-range": "40-99/100"}, 40),
        (206, {"content-range": "bytes 40-99/100", "etag": '"other"'}, 40),
        (206, {}, 40),
        (416, {}, 40),
        (204, {}, 0),
    ],
)
def test_wrong_answers(status: int, headers: dict[str, str], have: int) -> None:
    with pytest.raises(WrongAnswer):
        read_answer(status, headers, have, Expected(100, STRONG))


@given(
    status=st.sampled_from([200, 206, 416]),
    content_range=st.one_of(
        st.text(max_size=30), st.builds("bytes {}-{}/{}".format, *[st.integers(0, 200)] * 2, st.integers(0, 200))
    ),
    length=st.one_of(st.none(), st.integers(-5, 200).map(str), st.text(max_size=5)),
    have=st.integers(0, 100),
    has_hash=st.booleans(),
)
def test_no_answer_puts_bytes_in_the_wrong_place(
    status: int, content_range: str, length: str | None, have: int, has_hash: bool
) -> None:
    headers = {"content-range": content_range} | ({} if length is None else {"content-length": length})
    try:
        body = read_answer(status, headers, have, Expected(100, STRONG, has_hash))
    except WrongAnswer:
        return
    assert body.start in (0, have)
    assert body.length is None or 0 <= body.length <= 100 - body.start
    assert body.total == 100


# -- URLs -----------------------------------------------------------------------------------------


def test_which_redirects_are_followed() -> None:
    assert redirected("https://a.example/x/y", "z?q") == "https://a.example/x/z?q"
    assert redirected("https://a.example/x", "https://b.example/y") == "https://b.example/y"
    assert redirected("http://127.0.0.1:8/x", "http://localhost:9/y") == "http://localhost:9/y"
    for url, location in (
        ("https://a.example/x", "http://b.example/y"),
        ("https://a.example/x", "http://127.0.0.1/y"),
        ("https://a.example/x", "file:///etc/passwd"),
        ("https://a.example/x", "https://user:password@b.example/"),
        ("https://a.example/x", "//[oops"),
    ):
        with pytest.raises(HubError) as raised:
            redirected(url, location)
        assert raised.value.remedy
        assert "password" not in str(raised.value).replace("a password", "")


def test_origins_differ_by_scheme_host_and_port() -> None:
    assert origin_of("https://a.example/x") == origin_of("https://A.example:443/y")
    assert len({origin_of(url) for url in ("https://a.b", "http://a.b", "https://a.b:444", "https://b.b")}) == 4


@all_cases("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]", "hub.localhost"])
def test_http_is_for_this_machine(host: str) -> None:
    parse_url(f"http://{host}:8/x")
    with pytest.raises(HubError, match="not encrypted"):
        parse_url("http://10.0.0.1/x")
    with pytest.raises(HubError, match="not encrypted"):
        parse_url(f"http://{host.strip('[]').replace(':', '')}.example.com/x")


def test_secrets_of_a_url_are_not_shown() -> None:
    assert without_secrets("https://u:p@a.example:8/x/y.gguf?signature=1#f") == "https://a.example:8/x/y.gguf"


# -- attempts -------------------------------------------------------------------------------------


def test_delays_grow_to_a_bound_and_end() -> None:
    delays = Delays(attempts=5, first_s=1, longest_s=3)
    assert [delays.after(n, None) for n in range(6)] == [0, 1, 2, 3, 3, None]
    assert delays.after(1, 20.0) == 20.0, "as the server asks"


# -- the environment ------------------------------------------------------------------------------


def test_where_models_are(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    places = find_model_locations(home)
    assert places.folder.name == "models"
    assert places.huggingface == tmp_path / ".cache" / "huggingface" / "hub"
    assert places.ollama[0] == tmp_path / ".ollama" / "models"
    assert find_model_locations(home, tmp_path / "mine").folder == tmp_path / "mine"
    moved = find_model_locations({**home, "HF_HOME": "/h", "OLLAMA_MODELS": "/o", "HF_HUB_OFFLINE": "1"})
    assert (moved.huggingface, moved.ollama, moved.is_offline) == (Path("/h/hub"), (Path("/o"),), True)
    assert find_model_locations({**home, "HF_HUB_CACHE": "/c", "HF_HOME": "/h"}).huggingface == Path("/c")
    with pytest.raises(HubError, match=r"HF_ENDPOINT: http://mirror.example is not encrypted"):
        find_model_locations({**home, "HF_ENDPOINT": "http://mirror.example"})


def test_where_the_token_is(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert read_token(find_model_locations(home)) is None
    file = tmp_path / ".cache" / "huggingface" / "token"
    file.parent.mkdir(parents=True)
    file.write_text("hf_file\n")
    assert read_token(find_model_locations(home)) == "hf_file"
    assert read_token(find_model_locations({**home, "HF_TOKEN": " hf_variable "})) == "hf_variable"
    assert read_token(find_model_locations({**home, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"})) is None
    with pytest.raises(HubError, match="HF_TOKEN does not hold a valid token"):
        read_token(find_model_locations({**home, "HF_TOKEN": "a\r\nHost: b"}))
