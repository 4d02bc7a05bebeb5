"""Write the tokenizer of a GGUF file as a Hugging Face tokenizer folder, for load generators that need one.

The folder has ``tokenizer.json`` and ``tokenizer_config.json``, and nothing around a text: no BOS, no chat template.
"""

from __future__ import annotations

import json
from pathlib import Path

from uma_trio.models.gguf_header import read_header
from uma_trio.tokenizer.tokenizer import Tokenizer
from uma_trio.tokenizer.tokenizer_json import tokenizer_json


def write_folder(model: Path, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer of ``model`` into ``folder``, which exists.  Blocks for seconds with a large vocabulary.

    Raises:
        CannotExpress: its vocabulary cannot be written.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": tokenizer.bos or None,
        "eos_token": tokenizer.eos or None,
    }
    bare = {**tokenizer_json(read_header(model, vocab_only=True), tokenizer), "post_processor": None}
    for name, content in (("tokenizer.json", bare), ("tokenizer_config.json", config)):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
