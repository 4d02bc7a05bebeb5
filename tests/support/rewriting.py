"""The processes of a run share the work of rewriting assertions, which takes longer than the rest of a first collection.

Each of them collects all tests.  pytest keeps what it has rewritten, but processes that begin together would all rewrite
every file.
"""

from __future__ import annotations

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config, number: int, of: int) -> None:
    """Rewrite the files ``number``, ``number + of`` and so on of those that will be collected, and keep them."""
    places = [config.invocation_params.dir / each.partition("::")[0] for each in config.args]
    files = sorted({file for each in places for file in (each.rglob("test_*.py") if each.is_dir() else [each])})
    state = config.stash[rewrite.assertstate_key]
    for file in files[number::of]:
        kept = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, kept) is None and rewrite.try_makedirs(kept.parent):
            source_hash, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, source_hash, kept)
