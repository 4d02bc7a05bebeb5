"""The answers of a controller as a tree: texts add up whatever forks and backtracks there are."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from uma_trio.cli.run_view import tree_lines
from uma_trio.protocol.answer_tree import AnswerTree, Segment
from uma_trio.protocol.controllers import Backtrack, ControllerOutput, Fork
from uma_trio.protocol.events import Failure, PrefillProgress, Token, UnknownEvent
from uma_trio.protocol.messages import Event

moves = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["text", "text", "fork", "back"]), st.text("ab", max_size=3))
)


def played(script: list[tuple[int, str, str]]) -> tuple[AnswerTree, dict[int, str]]:
    """A tree, and the text that each of its answers must have."""
    tree, texts = AnswerTree(), {0: ""}
    tree.add(Token(id="r", index=0, text=""))
    for which, kind, text in script:
        index = which % len(texts)
        event: Event = Token(id="r", index=index, text=text)
        if kind == "fork":
            event = Fork(id="r", index=len(texts), parent=index)
            texts[len(texts)] = texts[index]
        elif kind == "back":
            removed = texts[index][-len(text) :] if text else ""
            texts[index] = texts[index].removesuffix(removed)
            event = Backtrack(id="r", index=index, tokens=1, text=removed)
        else:
            texts[index] += text
        tree.add(event)
    return tree, texts


def leaves(segment: Segment, before: str = "") -> Iterator[tuple[int, str]]:
    if segment.answer is not None:
        yield segment.answer.index, before + segment.text
    for child in segment.children:
        yield from leaves(child, before + segment.text)


@given(moves)
def test_each_answer_is_a_leaf_whose_path_is_its_text(script: list[tuple[int, str, str]]) -> None:
    tree, texts = played(script)
    assert {answer.index: answer.text for answer in tree} == texts
    found = list(leaves(tree.segments()))
    assert dict(found) == texts
    assert len(found) == len(texts)
    assert sum("[" in line for line in tree_lines(tree)) == len(texts)


def test_what_is_no_part_of_an_answer_is_passed_over() -> None:
    tree = AnswerTree()
    for event in (
        PrefillProgress(id="r", prefilled_tokens=1, prompt_tokens=2),
        UnknownEvent({"event": "new", "index": 0}),
        Failure(code="E_RUNTIME_SHUTDOWN", message="", id="r"),
    ):
        assert tree.add(event) is None
    assert (len(tree), tree.is_done, tree.segments().text) == (0, False, "")


def test_counts_and_logs() -> None:
    tree, _ = played([(0, "text", "a")])
    tree.add(Token(id="r", index=0, text="b", inserted=True))
    tree.add(ControllerOutput(id="r", index=0, logs="x\n"))
    tree.add(ControllerOutput(id="r", index=0, logs="y\n"))
    assert (tree[0].sampled_tokens, tree[0].inserted_tokens, tree[0].logs) == (2, 1, "x\ny\n")


def test_a_long_text_is_cut_in_the_tree() -> None:
    tree, _ = played([(0, "text", "a")])
    tree.add(Token(id="r", index=0, text="b" * 1000 + "\nend"))
    [line] = tree_lines(tree)
    assert len(line) < 250
    assert line.endswith("⏎end")
