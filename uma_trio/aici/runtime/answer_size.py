"""Makes answers fit into a message, at the cost of the controllers that say most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar, overload

import msgspec

from uma_trio.aici.runtime.live_sequence import worker_error
from uma_trio.aici_link.messages import MidAnswer, PostPreAnswer, SequenceResult

T = TypeVar("T")

FRAME_BYTES: Final = 1024
"""Room for the frame around the results of an answer, without the id of the request, which the daemon chooses."""

KEY_BYTES: Final = 16
"""``"4294967295":`` and a comma."""

CUT: Final = "\n[...]\n"


@overload
def shorten_to_fit(answer: PostPreAnswer, n_bytes: int) -> tuple[PostPreAnswer, set[int]]: ...
@overload
def shorten_to_fit(answer: MidAnswer, n_bytes: int) -> tuple[MidAnswer, set[int]]: ...
def shorten_to_fit(answer: PostPreAnswer | MidAnswer, n_bytes: int) -> tuple[PostPreAnswer | MidAnswer, set[int]]:
    """The answer, with results that need no more than ``n_bytes`` as JSON.

    Results get equal shares; what small ones leave over is not given to others.  A result that is larger than its share
    loses the middle of its logs, and of its error.  If that is not enough, it becomes an error.

    Returns:
        The answer, and the sequences whose results have become errors.
    """
    if isinstance(answer, MidAnswer):
        share = n_bytes // max(1, len(answer.seqs))
        seqs, gone = _fitting(answer.seqs, share)
        return MidAnswer(seqs, answer.num_seqs), gone
    share = n_bytes // max(1, len(answer.post_seqs) + len(answer.pre_seqs))
    post, gone_in_post = _fitting(answer.post_seqs, share)
    pre, gone_in_pre = _fitting(answer.pre_seqs, share)
    return PostPreAnswer(post, pre), gone_in_post | gone_in_pre


def _fitting(results: Mapping[str, SequenceResult[T]], share: int) -> tuple[dict[str, SequenceResult[T]], set[int]]:
    fitting, gone = {}, set()
    for id, result in results.items():
        if _size(result) > share:
            result = _shortened(result, share)
            if (size := _size(result)) > share:
                result = worker_error(f"its controller says too much at once: {size} bytes, with room for {share}")
                gone.add(int(id))
        fitting[id] = result
    return fitting, gone


def _shortened(result: SequenceResult[T], share: int) -> SequenceResult[T]:
    n_characters = share // 16  # of each of two texts; JSON needs up to 6 bytes for one
    return msgspec.structs.replace(result, error=_cut(result.error, n_characters), logs=_cut(result.logs, n_characters))


def _cut(text: str, n_characters: int) -> str:
    if len(text) <= n_characters:
        return text
    half = max(0, n_characters - len(CUT)) // 2
    return text[:half] + CUT + text[len(text) - half :]


def _size(result: SequenceResult[Any]) -> int:
    return len(msgspec.json.encode(result)) + KEY_BYTES
