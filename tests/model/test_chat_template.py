"""Which chat template the daemon uses, and what it says about it."""

import threading

import pytest
import trio

from tests.support.real_daemon import real_daemon
from tests.support.serving import settings
from uma_trio.daemon.engines import loaded
from uma_trio.daemon.engines.link import ProcessLauncher
from uma_trio.daemon.prompts import open_prompts
from uma_trio.models.packaged import EMBEDDED

pytestmark = pytest.mark.usefixtures("forked_children")

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "echo": True}


def started_with(daemon, event):
    [line] = daemon.logged(event)
    return line


@pytest.fixture
def without_template(library, tmp_path):
    """The embedded model without its chat template."""
    data = EMBEDDED.read_bytes()
    key = b"tokenizer.chat_template"
    assert data.count(key) == 1
    path = tmp_path / "plain.gguf"
    path.write_bytes(data.replace(key, b"tokenizer.chat_templatX"))
    return path


def test_the_template_of_the_model_file(library, tmp_path):
    with real_daemon(folder=tmp_path) as daemon:
        assert daemon.ask(**CHAT).code is None
        assert started_with(daemon, "chat template")["template"] == "of the model file"


def test_a_template_of_the_package(library, tmp_path):
    with real_daemon("--chat-template", "mistral", folder=tmp_path) as daemon:
        assert "[INST] Hello [/INST]" in daemon.ask(**CHAT).text
        assert started_with(daemon, "chat template")["template"] == "mistral (built in)"


def test_a_file_in_place_of_a_missing_template(without_template, tmp_path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<<{{ m.content }}>>{% endfor %}")
    flags = ("--model", str(without_template), "--chat-template", str(tmp_path / "own.jinja"))
    with real_daemon(*flags, folder=tmp_path) as daemon:
        assert "<<Hello>>" in daemon.ask(**CHAT).text
        assert started_with(daemon, "chat template")["template"] == str(tmp_path / "own.jinja")
    assert "the model has no chat template; it serves plain prompts" not in daemon.events_logged()


def test_a_model_without_a_template_says_so_and_names_the_flag(without_template, tmp_path):
    with real_daemon("--model", str(without_template), folder=tmp_path) as daemon:
        line = started_with(daemon, "the model has no chat template; it serves plain prompts")
        assert (line["level"], line["hint"].split()[0]) == ("warning", "--chat-template")
        assert started_with(daemon, "chat template")["template"] == "none"
        refused = daemon.ask(**CHAT)
        assert refused.code == "E_MODEL_NO_CHAT_TEMPLATE"
        assert "--chat-template" in refused.last["message"]
        assert daemon.ask(prompt="Hello", max_tokens=1).reason == "length"


async def test_no_stream_of_another_model_waits_for_a_template_to_start(library, monkeypatch):
    """It is compiled in a process of its own, whose start takes a good part of a second on a busy machine."""
    threads, start = [], open_prompts.ChatTemplate

    def started(*args, **kwargs):
        threads.append(threading.get_ident())
        return start(*args, **kwargs)

    monkeypatch.setattr(open_prompts, "ChatTemplate", started)
    async with trio.open_nursery() as nursery, loaded.open_model(settings(), ProcessLauncher(nursery)) as model:
        assert model.prompts.chat is not None
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
