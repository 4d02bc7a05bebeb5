"""A pytest plugin for llama.cpp's tests of llama-server: another server, and the embedded model.

``llama_server_tests.py`` runs those tests with it.  The environment says what to do:

| variable | |
|---|---|
| ``SUITE_SERVER`` | ``uma-trio`` or ``llama-server`` |
| ``SUITE_RESULTS`` | file for the results: a line of JSON for each test |
| ``LLAMA_SERVER_BIN_PATH`` | llama-server; the suite's own variable |
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import requests

from uma_trio.daemon.prompts.chosen_template import built_in
from uma_trio.gateway.key_file import editing
from uma_trio.gateway.tenants import Tenants, change, new_key
from uma_trio.models.packaged import EMBEDDED

START_S: Final = 120.0
STOP_S: Final = 20.0
POLL_S: Final = 0.05

NEEDS_FRESH: Final = ("cache", "metrics", "progress")
"""Words in the names of tests that count what the server has done since its start, or what it has cached."""

NO_COUNTERPART: Final = {
    "backend_sampling": "sampling in the backend",
    "enable_ctx_shift": "context shift for all requests",
    "gcp_compat": "Vertex AI's protocol",
    "lora_files": "LoRA",
    "media_path": "images",
    "model_draft": "draft models",
    "model_tags": "tags of models",
    "mmproj_url": "images",
    "mcp_servers_config": "MCP",
    "mcp_servers_json": "MCP",
    "models_dir": "the router",
    "server_reranking": "reranking",
    "server_tools": "tools that the server runs",
    "sleep_idle_seconds": "unloading an idle model",
    "slot_save_path": "slots in files; sessions do that",
    "spec_type": "kinds of speculation",
    "ui_mcp_proxy": "a proxy for MCP",
}
"""Settings of llama-server, and what uma-trio does not have.  A test that sets one of them is skipped."""

NEEDED_MODELS: Final = {
    "ggml-org/tinygemma3-GGUF:Q8_0": "a vision model",
}
"""Models that the embedded model cannot replace."""

# The suite's conftest.py imports these two for downloads, and there are none.
sys.modules["wget"] = types.ModuleType("wget")
sys.modules["filelock"] = types.ModuleType("filelock")
sys.modules["filelock"].FileLock = lambda path: contextlib.nullcontext()  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    """Replace the server, and what the suite downloads."""
    import utils  # type: ignore[import-not-found] # of the suite

    utils.ServerPreset.load_all = staticmethod(lambda: None)
    process = utils.ServerProcess
    if os.environ["SUITE_SERVER"] == "uma-trio":
        process.start, process.stop = start, stop
    else:
        process.start = with_embedded_model(process.start)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note the outcome of each test, and where and why it failed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when != "call" and report.outcome == "passed":
        return
    note = {"test": item.nodeid.removeprefix("unit/"), "outcome": report.outcome, "line": "", "why": ""}
    if report.skipped:
        note["why"] = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        entry = next(
            (entry for entry in reversed(call.excinfo.traceback) if Path(entry.path).parent.name == "unit"),
            call.excinfo.traceback[-1],
        )
        note |= {"line": str(entry.lineno + 1), "why": call.excinfo.exconly(tryshort=True).splitlines()[0]}
    with open(os.environ["SUITE_RESULTS"], "a") as file:
        file.write(json.dumps(note) + "\n")


def check_model(server: Any) -> None:
    """Skip the test if the embedded model cannot take the place of its model."""
    needed = NEEDED_MODELS.get(server.model_hf_repo or "")
    if needed is not None:
        pytest.skip(f"needs {needed}")


def with_embedded_model(original: Callable[..., None]) -> Callable[..., None]:
    """The suite's own ``start``, with the embedded model in place of the one from Hugging Face."""

    def start_llama_server(server: Any, *args: Any, **kwargs: Any) -> None:
        check_model(server)
        if server.model_hf_repo is not None:
            server.model_hf_repo = server.model_hf_file = None
            server.model_file = str(EMBEDDED)
        if server.server_embeddings and not server.pooling:
            server.pooling = "mean"  # as uma-trio does; the tests' own model says it
        server.n_threads = 1
        original(server, *args, **kwargs)

    return start_llama_server


# -- uma-trio in place of llama-server --------------------------------------------------------------


@attrs.frozen
class Running:
    """A daemon of earlier tests."""

    settings: dict[str, Any]
    process: subprocess.Popen[bytes]
    folder: Path
    api_key: str | None

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


running: Running | None = None


def pytest_unconfigure() -> None:
    """Stop the last daemon."""
    if running is not None:
        running.stop()


def start(server: Any, timeout_seconds: float = START_S) -> None:
    """Serve with the settings of a test: start ``uma-trio``, or go on with the daemon of the test before.

    Starting takes seconds, and most tests have the same settings.
    """
    global running
    check_model(server)
    for name, what in NO_COUNTERPART.items():
        if getattr(server, name):
            pytest.skip(f"uma-trio does not have {what}")
    settings = {name: value for name, value in vars(server).items() if name not in ("api_key", "process")}
    settings["has_key"] = bool(server.api_key)
    is_fresh = any(word in os.environ["PYTEST_CURRENT_TEST"] for word in NEEDS_FRESH)
    if running is not None and (is_fresh or running.settings != settings or running.process.poll() is not None):
        running.stop()
        running = None
    if running is None:
        folder = Path(tempfile.mkdtemp(prefix="suite-"))
        arguments = flags(server, folder)
        log = folder / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "uma_trio", "serve", "--http-any-model", *arguments],
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        running = Running(settings, process, folder, server.api_key)
        wait_until_healthy(server, running)
    server.api_key = running.api_key


def wait_until_healthy(server: Any, running: Running) -> None:
    """Return when it answers.

    Raises:
        RuntimeError: it has ended, or takes too long.
    """
    url, until = f"http://{server.server_host}:{server.server_port}/health", time.monotonic() + START_S
    while time.monotonic() < until and running.process.poll() is None:
        with contextlib.suppress(requests.ConnectionError):
            if requests.get(url, timeout=START_S).status_code == 200:
                return
        time.sleep(POLL_S)
    raise RuntimeError(f"uma-trio does not serve: {(running.folder / 'log').read_text()[-2000:]}")


def stop(server: Any) -> None:
    """Leave the daemon to the next test."""


def flags(server: Any, folder: Path) -> list[str]:
    """The flags of ``uma-trio serve`` for the settings of a test.

    Some settings need none: embeddings, metrics, Jinja and continuous batching are always there.  Texts do not
    depend on the batch, so one that is too small for uma-trio is made larger.
    """
    if "," in server.server_host:
        pytest.skip("uma-trio does not have several addresses")
    if server.pooling == "none":
        pytest.skip("uma-trio does not have embeddings of single tokens")
    if server.reasoning in ("on", "off"):
        pytest.skip("uma-trio does not have reasoning on or off for all requests; chat_template_kwargs does it for one")
    model = EMBEDDED
    if server.model_alias:
        if "," in server.model_alias:
            pytest.skip("uma-trio does not have several names for a model")
        model = folder / f"{server.model_alias}.gguf"
        model.symlink_to(EMBEDDED)
    batch = None if server.n_batch is None else max(32, server.n_batch)
    values: dict[str, Any] = {
        "--http": f"{server.server_host}:{server.server_port}",
        "--socket": folder / "socket",
        "--state-dir": folder / "state",
        "--http-keys": keys(server, folder) if server.api_key else None,
        "--layout-trial-s": 0,
        "--model": model,
        "--threads": 1,
        "--ctx": server.n_ctx,
        "--parallel": server.n_slots,
        "--kv-unified": "on" if server.kv_unified else "off",
        "--batch-tokens": batch,
        "--prefill-burst-tokens": None if batch is None else min(64, batch - (server.n_slots or 8)),
        "--type-k": server.ctk,
        "--type-v": server.ctv,
        "--flash-attn": server.fa,
        "--temp": server.temperature,
        "--seed": server.seed,
        "--default-max-tokens": server.n_predict if (server.n_predict or 0) > 0 else None,
        "--http-origins": server.cors_origins or "*",  # llama-server's default
        "--metrics-compat": "llama-server",
        "--chat-template": template(server, folder),
    }
    given = [str(part) for flag, value in values.items() if value is not None for part in (flag, value)]
    return [*given, *(["--http-verbose"] if server.debug else [])]


def template(server: Any, folder: Path) -> str | Path | None:
    """The chat template: a file, one that uma-trio has under this name, or the text itself."""
    if server.chat_template_file:
        return Path(server.chat_template_file).resolve()
    if server.chat_template is None or server.chat_template in built_in():
        return server.chat_template
    if " " not in server.chat_template:
        pytest.skip(f"uma-trio does not have a chat template called {server.chat_template}")
    file = folder / "template.jinja"
    file.write_text(server.chat_template)
    return file


def keys(server: Any, folder: Path) -> Path:
    """A file of tenants.  Keys cannot be chosen, so the test gets the new one in place of its own."""
    file = folder / "keys.yaml"
    with editing(file) as tenants:
        text, key = new_key(Tenants({}), "2026-01-01")
        tenants["suite"] = change("suite", None, {}, key)
    for module in list(sys.modules.values()):
        if getattr(module, "TEST_API_KEY", None) == server.api_key:
            module.TEST_API_KEY = text  # type: ignore[attr-defined]
    server.api_key = text
    return file
