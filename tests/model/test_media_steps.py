"""Steps with rows in place of tokens, on the real engine.

The rows are the embeddings of the tokens whose place they take.  So the answer must be the one without rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest

from llama_abi.locations import library_directory
from llama_abi.stamp import Stamp
from tests.support.bench_scripts import bench_script
from tests.support.link_contract import alone, answers, prefill
from tests.support.state_files import memory_file
from uma_trio import config
from uma_trio.daemon.engines.link import ProcessLauncher, ThreadLauncher
from uma_trio.engine.open_fitted import open_engine
from uma_trio.engine_link.kv_ops import Truncate
from uma_trio.engine_link.media import MediaRows
from uma_trio.engine_link.messages import MAX_FDS, EngineError, SampleRequest, Start, Step, StepInput, StepOutput
from uma_trio.engine_link.sampling import SamplingParams
from uma_trio.models.packaged import EMBEDDED
from uma_trio.tokenizer.tokenizer import open_vocabulary

pytestmark = pytest.mark.usefixtures("forked_children")

SETTINGS = config.Model(ctx=4096, parallel=4, batch_tokens=64, threads=1, layout_trial_s=0)
PLACEHOLDER, N_ANSWER = 1 << 30, 12
GREEDY = SamplingParams()


@pytest.fixture(params=["process", "thread"])
async def link(request, nursery, library):
    if not Stamp.read(library_directory()).mtmd_sha256:
        pytest.skip("the library has no libmtmd: ./build_llama.sh --dev builds it")
    launcher = ProcessLauncher(nursery) if request.param == "process" else ThreadLauncher(nursery, open_engine)
    link = launcher.launch(EMBEDDED.name)
    assert await link.load(Start(EMBEDDED, SETTINGS), lambda share: None, lambda: True)
    yield link
    await link.aclose()


@pytest.fixture(scope="module")
def prompt(library: object) -> list[int]:
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    with open_vocabulary(EMBEDDED) as vocabulary:
        found: list[int] = vocabulary.tokenizer.encode(text).tolist()
    assert len(found) > 12
    return found


@pytest.fixture(scope="module")
def embeddings() -> np.ndarray:
    """The embedding of each token, ``[n_vocab, n_embd]`` float32."""
    reader = bench_script("gguf_file").Reader(Path(EMBEDDED))
    [tensor] = [each for each in reader.tensors if each.name == "token_embd.weight"]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)


def with_rows(prompt: Sequence[int], spans: Sequence[tuple[int, int]], fd: int, seq_id: int = 0) -> StepInput:
    """``prompt``, whose tokens in ``spans`` are rows.  The file has a row for each token of the prompt."""
    tokens = [*prompt]
    for start, end in spans:
        tokens[start:end] = range(PLACEHOLDER + start, PLACEHOLDER + end)
    media = [MediaRows(start, end - start, fd, start) for start, end in spans]
    return StepInput(seq_id, 0, tokens, [SampleRequest(GREEDY)], media=media)


async def answer(link, each: StepInput) -> list[int]:
    said = [*(await link.compute(Step([Truncate(0)], [[each]]))).tokens]
    position = len(each.tokens)
    while len(said) < N_ANSWER:
        step = Step((), [[StepInput(0, position + len(said) - 1, said[-1:], [SampleRequest(GREEDY, len(said))])]])
        said += (await link.compute(step)).tokens
    await link.compute(Step([Truncate(0)]))
    return said


async def test_rows_that_are_the_embeddings_of_tokens_give_the_same_answer(link, prompt, embeddings):
    expected = await alone(link, prompt, N_ANSWER)
    fd = memory_file(embeddings[prompt].tobytes())
    n = len(prompt)
    for spans in ([(3, 9)], [(0, 4)], [(n - 3, n)], [(2, 4), (4, 6), (8, 9)], [(0, n)]):
        assert await answer(link, with_rows(prompt, spans, fd)) == expected, spans
    other = memory_file(embeddings[prompt[::-1]].tobytes())
    assert await answer(link, with_rows(prompt, [(3, n - 1)], other)) != expected
    os.close(fd)
    os.close(other)


async def test_rows_come_in_chunks_next_to_streams(link, prompt, embeddings):
    expected = await alone(link, prompt, N_ANSWER)
    fd = memory_file(embeddings[prompt].tobytes())
    stream = [*(await link.compute(Step((), [[prefill(1, prompt)]]))).tokens]
    whole = with_rows(prompt, [(3, 9)], fd)
    first: list[int] = []
    for start, end in ((0, 5), (5, 7), (7, len(prompt))):
        at = max(3, start)
        media = [MediaRows(at - start, min(9, end) - at, fd, at)]
        samples = [SampleRequest(GREEDY)] if end == len(prompt) else []
        chunk = StepInput(0, start, whole.tokens[start:end], samples, media=media)
        row = StepInput(1, len(prompt) + len(stream) - 1, stream[-1:], [SampleRequest(GREEDY, len(stream))])
        token, *first = (await link.compute(Step((), [[row, chunk]]))).tokens
        stream.append(token)
    os.close(fd)
    assert (stream, first) == (expected[:4], expected[:1])


async def test_a_stream_goes_on_after_a_prompt_with_rows_in_steps_that_run_ahead(link, prompt, embeddings):
    expected = await alone(link, prompt, N_ANSWER)
    fd = memory_file(embeddings[prompt].tobytes())
    link.submit(Step((), [[with_rows(prompt, [(2, 5), (7, 11)], fd)]], 1))
    os.close(fd)
    found: list[object] = []
    for number in range(2, N_ANSWER + 1):
        link.submit(Step((), [[0]], number, number - 1))
        while len(found) < number - 1:
            found += await link.receive()
    if len(found) < N_ANSWER:
        found += await answers(link, 1)
    said = [token for output in found if isinstance(output, StepOutput) for token in output.tokens]
    assert said == expected


async def test_a_file_with_too_few_rows_fails_the_step_and_leaves_nothing_open(link, prompt, embeddings):
    expected = await alone(link, prompt, N_ANSWER)
    process = psutil.Process(link.pid)
    fd = memory_file(embeddings[prompt[:5]].tobytes())
    before = process.num_fds()
    for _ in range(3):
        with pytest.raises(EngineError):
            await link.compute(Step([Truncate(0)], [[with_rows(prompt, [(3, 9)], fd)]]))
    assert await alone(link, prompt, N_ANSWER) == expected  # which comes when the steps before are put away
    assert process.num_fds() == before
    os.close(fd)


async def test_a_step_has_more_files_than_go_with_a_byte(link, prompt, embeddings):
    longer = [*prompt, *prompt]
    expected = await alone(link, longer, N_ANSWER)
    fd = memory_file(embeddings[longer].tobytes())
    spans = [(n, n + 1) for n in range(len(longer))]  # each has a descriptor of its own
    assert len(spans) > 2 * MAX_FDS
    assert await answer(link, with_rows(longer, spans, fd)) == expected
    os.close(fd)
