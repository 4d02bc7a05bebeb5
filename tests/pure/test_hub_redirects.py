"""Redirects of a server of the internet lead to no place inside the network of this machine."""

from __future__ import annotations

import httpx2
import pytest

from tests.support.cases import all_cases
from uma_trio.hub.errors import HubError
from uma_trio.hub.http import Http
from uma_trio.hub.urls import is_public

NAMES = {
    "hub.example": ["93.184.216.34"],
    "files.example": ["93.184.216.35", "2606:2800:220:1::1"],
    "metadata.example": ["169.254.169.254"],
    "one-of-two.example": ["93.184.216.34", "10.0.0.7"],
    "hub.inside": ["10.0.0.5"],
    "files.inside": ["10.0.0.6"],
}


async def resolve(host: str) -> list[str]:
    return NAMES.get(host, [host] if host[0].isdigit() or ":" in host else [])


async def read(url: str, *redirects: str) -> str:
    """The URL that answers in the end."""
    left = [*redirects]

    def answer(request: httpx2.Request) -> httpx2.Response:
        opened.append(str(request.url))
        return httpx2.Response(302, headers={"location": left.pop(0)}) if left else httpx2.Response(200, json={})

    opened: list[str] = []
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
        http = Http(client, url, "secret", resolve=resolve)
        async with http.get(url):
            return opened[-1]


@pytest.mark.parametrize(
    "target",
    [
        "https://metadata.example/latest",
        "https://169.254.169.254/latest",
        "https://one-of-two.example/",
        "https://hub.inside/",
        "https://192.168.0.1/",
        "https://127.0.0.1:8443/",
        "https://[::1]/",
        "https://[fe80::1]/",
        "https://[fd00::1]/",
        "https://[::ffff:10.0.0.1]/",
        "https://[64:ff9b::a9fe:a9fe]/",
        "https://0.0.0.0/",
        "https://100.64.0.1/",
    ],
)
async def test_a_public_server_does_not_redirect_into_this_network(target: str) -> None:
    with pytest.raises(HubError, match="inside this network"):
        await read("https://hub.example/model", target)
    with pytest.raises(HubError, match="inside this network"):
        await read("https://hub.example/model", "https://files.example/model", target)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://hub.example/model", "https://files.example/model"),
        ("https://hub.example/model", "https://hub.example/other"),
        ("https://hub.example/model", "https://no-address.example/behind-a-proxy"),
        ("https://hub.inside/model", "https://files.inside/model"),
        ("https://hub.inside/model", "https://files.example/model"),
        ("http://127.0.0.1:8000/model", "http://127.0.0.1:9000/model"),
    ],
)
async def test_other_redirects_are_followed(url: str, target: str) -> None:
    assert await read(url, target) == target


@all_cases("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@all_cases(
    "address",
    [
        *["10.1.2.3", "172.16.0.1", "224.0.0.1", "fe80::1%eth0", "2002:0a00:0001::1", "::", "nonsense"],
        *["::127.0.0.1", "64:ff9b:1::7f00:1", "::ffff:0:127.0.0.1", "fec0::1", "3fff::1", "5f00::1"],
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)
