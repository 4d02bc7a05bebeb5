"""Real chat templates, which llama.cpp's source has: which markers of reasoning they have, and which open the reasoning.

A budget ends it with the markers of the model.
"""

from __future__ import annotations

import pytest

from tests.support.profile import sampled
from tests.support.real_daemon import ROOT
from uma_trio.daemon.prompts.chat import ChatTemplate
from uma_trio.daemon.prompts.marker_text import MarkerText
from uma_trio.daemon.prompts.reasoning import find_format, make_markers
from uma_trio.daemon.text.budget import ReasoningLimit

pytestmark = pytest.mark.usefixtures("forked_children")

FOLDER = ROOT / "build" / "llama.cpp" / "models" / "templates"


@pytest.mark.parametrize(
    ("name", "begin", "opens"),
    sampled(
        [
            ("Apertus-8B-Instruct", "<|inner_prefix|>", False),
            ("Apriel-1.6-15b-Thinker-fixed", "Here are my reasoning steps:", True),
            ("ByteDance-Seed-OSS", "<seed:think>", False),
            ("Cohere2MoE", "<|START_THINKING|>", True),
            ("GLM-4.6", "<think>", False),
            ("GLM-4.7-Flash", "<think>", True),
            ("MiniMax-M2", "<think>", True),
            ("Qwen-Qwen2.5-7B-Instruct", None, False),
            ("Qwen-Qwen3-0.6B", "<think>", False),
            ("Qwen3.5-4B", "<think>", True),
            ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "<think>", True),
            ("deepseek-ai-DeepSeek-V3.1", "<think>", True),
            ("google-gemma-4-31B-it", "<|channel>thought", False),
            ("ibm-granite-granite-3.3-2B-Instruct", "<think>", False),
            ("meta-llama-Llama-3.1-8B-Instruct", None, False),
            ("mistralai-Ministral-3-14B-Reasoning-2512", "[THINK]", False),
            ("openai-gpt-oss-120b", "<|channel|>analysis<|message|>", False),
            ("upstage-Solar-Open-100B", "<|think|>", False),
        ],
        3,
    ),
)
def test_a_real_template(name: str, begin: str | None, opens: bool) -> None:
    path = FOLDER / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"there is no {path}: ./build_llama.sh --dev unpacks llama.cpp's source")
    source = path.read_text()
    found = find_format(source)
    assert (None if found is None else found.begin[0]) == begin
    if found is not None:
        prompt = ChatTemplate(source, bos="<s>", eos="</s>").render([{"role": "user", "content": "Hello"}])
        markers = make_markers(found, MarkerText(lambda _: None))
        assert markers.is_opened_by(prompt) is opens
        limit = ReasoningLimit(n_tokens=2, end=[ord(each) for each in markers.closed_by], markers=markers)
        budget = limit.budget(prompt, None)
        thought = [ord(each) for each in f"{'' if opens else found.begin[0]}ab"]
        ends = [budget.end_after([token], lambda token: chr(token).encode()) for token in thought]
        assert ends == [*[()] * (len(thought) - 1), limit.end]
        assert not budget.end_after([ord(each) for each in "the answer"], lambda token: chr(token).encode())
