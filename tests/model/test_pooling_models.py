"""Models that embed and rank next to one that generates, in one daemon."""

from __future__ import annotations

import numpy as np
import pytest
import trio

from tests.model.test_encoders import close, model, reference, texts, tokens_of
from tests.support.real_daemon import Canary, asked, real_daemon
from uma_trio.client import ServerError
from uma_trio.models.packaged import EMBEDDED

QUERY = "how do i make pancakes"
CONFIG = f"""
models:
  - name: chat
    model: {EMBEDDED}
    parallel: 4
    ctx: 4096
  - name: embedder
    model: {{embedder}}
  - name: reranker
    model: {{reranker}}
"""


@pytest.fixture(scope="module")
def three(library, tmp_path_factory):
    """A daemon with three models, one for each purpose."""
    folder = tmp_path_factory.mktemp("three")
    file = folder / "config.yaml"
    file.write_text(CONFIG.format(embedder=model("mean"), reranker=model("rank")))
    with real_daemon("--config", str(file)) as daemon:
        yield daemon


def test_each_model_says_what_it_is_for(three):
    found = {each.name: each.capabilities for each in asked(three, lambda client: client.models())}
    assert found["embedder"] == ["embedding"]
    assert found["reranker"] == ["rerank"]
    assert "completion" in found["chat"]


def test_streams_are_unchanged_while_others_embed_and_rank(three):
    given = texts(60)
    with Canary(three) as canary:
        found, ranked = [None], [None]

        async def main():
            async def embed():
                async with three.client() as client:
                    found[0] = await client.embed(given, model="embedder")

            async def rank():
                async with three.client() as client:
                    ranked[0] = await client.rerank(QUERY, given, model="reranker")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(embed)
                nursery.start_soon(rank)

        trio.run(main)
    assert canary.rounds
    expected = reference(model("mean"), tokens_of(model("mean"), given))
    assert np.abs(np.array(found[0].embeddings) - expected).max() < close()
    assert len(ranked[0].results) == len(given)
    three.settled()


def test_a_request_to_the_wrong_model_says_what_that_one_does(three):
    for name, does in (("chat", "generates text"), ("embedder", "embeds texts")):
        with pytest.raises(ServerError, match=f"the model {name} does not rank documents. It {does}"):
            asked(three, lambda client, name=name: client.rerank(QUERY, ["x"], model=name))
    assert three.ask(prompt="x", model="reranker").code == "E_PROTO_BAD_REQUEST"
    three.settled()


def test_a_model_that_is_not_loaded_is_loaded_and_ranks(three):
    asked(three, lambda client: client.manage_model("unload", "reranker"))
    [*_, described] = asked(three, lambda client: client.models())
    assert (described.state, described.capabilities) == ("unloaded", ["rerank"])
    assert (described.context_per_request, described.parallel) == (512, 1)
    assert len(asked(three, lambda client: client.rerank(QUERY, ["a", "b"], model="reranker")).results) == 2
    asked(three, lambda client: client.manage_model("reload", "embedder"))
    assert len(asked(three, lambda client: client.embed(["a"], model="embedder")).embeddings) == 1
