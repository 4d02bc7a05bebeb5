"""Which file is the projector of a model that another program keeps."""

from __future__ import annotations

import json
from pathlib import Path

from uma_trio.hub.caches import ollama_projectors
from uma_trio.models.packaged import EMBEDDED
from uma_trio.models.projector import find_projector


def test_ollama_says_which_projector_a_model_has(tmp_path: Path, projector: bytes) -> None:
    blobs, manifests = tmp_path / "blobs", tmp_path / "manifests" / "hf.co" / "acme" / "Tiny-GGUF"
    blobs.mkdir()
    manifests.mkdir(parents=True)
    model, other, sees, damaged = (blobs / f"sha256-{digit * 64}" for digit in "abcd")
    for each in (model, other):
        each.symlink_to(EMBEDDED)
    sees.write_bytes(projector)
    damaged.write_bytes(projector[:1000])

    def write(tag: str, **files: Path) -> None:
        layers = [
            {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": file.name.replace("-", ":")}
            for kind, file in files.items()
        ]
        (manifests / tag).write_text(json.dumps({"layers": layers}))

    write("Q8_0", model=model, projector=sees)
    write("again", model=model, projector=sees)
    write("text", model=other)
    (manifests / "half").write_text("{")
    assert ollama_projectors(model) == [sees]
    assert find_projector(model, ollama_projectors(model)) == sees
    assert ollama_projectors(other) == ollama_projectors(EMBEDDED) == []
    write("text", model=other, projector=damaged)
    assert ollama_projectors(other) == [damaged]
    assert find_projector(other, ollama_projectors(other)) is None
