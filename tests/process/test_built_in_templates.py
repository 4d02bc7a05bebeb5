"""The chat templates that come with the package."""

import os

import pytest

from uma_trio import config
from uma_trio.daemon.prompts.chat import ChatTemplate
from uma_trio.daemon.prompts.chosen_template import built_in, choose_template
from uma_trio.engine_link.load_errors import ModelError
from uma_trio.errors import BadRequest

pytestmark = pytest.mark.usefixtures("forked_children")

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
]

EXPECTED = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    ),
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\nHi<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    ),
    "llama2": ("<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello [/INST] Hi </s><s>[INST] Bye [/INST]"),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "mistral": "<s>[INST] Be brief.\n\nHello [/INST] Hi</s>[INST] Bye [/INST]",
    "phi3": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\nHi<|end|>\n<|user|>\nBye<|end|>\n"
        "<|assistant|>\n"
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_template_renders(name: str) -> None:
    source = choose_template(name)
    assert source.origin == f"{name} (built in)"
    template = ChatTemplate(source.text, bos="<s>", eos="</s>")
    assert template.render(TALK) == EXPECTED[name]
    without_end = template.render(TALK[:3], add_generation_prompt=False)
    assert "Hi" in without_end
    assert EXPECTED[name].startswith(without_end), "a session goes on from the text that is there"


def test_the_setting_names_all_of_them() -> None:
    [setting] = [found for found in config.settings() if found.name == "chat_template"]
    assert built_in() == sorted(EXPECTED)
    assert ", ".join(built_in()) in setting.help


def test_a_file(tmp_path, monkeypatch) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.chdir(tmp_path)
    source = choose_template("own.jinja")
    assert (source.text, source.origin) == ("{{ messages[0].content }}", "own.jinja")


def test_a_file_that_refuses_the_example_is_taken(tmp_path) -> None:
    path = tmp_path / "strict.jinja"
    path.write_text("{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}ok")
    template = ChatTemplate(choose_template(str(path)).text, bos="", eos="")
    assert template.render(TALK) == "ok"
    with pytest.raises(BadRequest, match="no system message"):
        template.render(TALK[1:])


@pytest.mark.parametrize("given", ["", "a\0b", "chatML", "./chatml", "~nobody-of-this-name/x"])
def test_what_is_no_template(given: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="--chat-template takes a Jinja file"):
        choose_template(given)


def test_a_pipe_is_no_template(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match=r"cannot read the chat template .*: it is not a regular file"):
        choose_template(str(tmp_path / "pipe"))


def test_files_that_are_no_templates(tmp_path) -> None:
    for data, reason in ((b" \n", "is empty; correct it"), (b"\xff", "it is not UTF-8 text")):
        (tmp_path / "a.jinja").write_bytes(data)
        with pytest.raises(ModelError, match=reason):
            choose_template(str(tmp_path / "a.jinja"))


def test_a_template_that_makes_half_characters_is_found_at_the_start(tmp_path) -> None:
    (tmp_path / "odd.jinja").write_text(r'{{ "\ud800" }}')
    with pytest.raises(ModelError, match="half of a surrogate pair"):
        choose_template(str(tmp_path / "odd.jinja"))
