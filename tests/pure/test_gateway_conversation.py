"""Which session a whole conversation is, and what of it is noise."""

from __future__ import annotations

from tests.support.cases import all_cases
from uma_trio.gateway.dialects.common.conversation import conversation_fields

HEADER = "x-anthropic-billing-header: cc_version=2.1.117.48f; cc_entrypoint=cli; cch=71fea;"


def chat(system: str, *, role: str = "system") -> list[dict[str, str]]:
    return [{"role": role, "content": system}, {"role": "user", "content": "Hello"}]


def session(headers: dict[str, str], messages: list[dict[str, str]] | None = None, **given: str) -> object:
    return conversation_fields(messages or chat("Be kind."), headers, **given).get("session_id")


def test_a_client_that_names_no_session_has_none() -> None:
    assert conversation_fields(chat("Be kind."), {}) == {"messages": chat("Be kind.")}
    assert conversation_fields(chat("Be kind."), {"x-session-id": ""}) == {"messages": chat("Be kind.")}


def test_a_session_id_names_exactly_this_session_and_the_request_replaces_it() -> None:
    fields = conversation_fields(chat("Be kind."), {"x-session-id": "other"}, session_id="s", cache_key="key")
    assert (fields["session_id"], fields["history"]) == ("s", "replace")


@all_cases("header", ["x-session-id", "x-claude-code-session-id"])
def test_headers_and_cache_keys_name_a_session_for_each_system_prompt(header: str) -> None:
    name = session({header: "abc"})
    assert name == session({}, cache_key="abc") == session({header: "abc"}, cache_key="other")
    assert str(name).startswith("abc:")
    assert name != session({header: "abc"}, chat("Write a title."))
    assert name == session({header: "abc"}, [*chat("Be kind."), {"role": "assistant", "content": "Hi."}])
    assert len(str(session({header: "x" * 5000}))) <= 256
    assert str(session({header: "\x9b2J"})).isprintable()


@all_cases("role", ["system", "developer"])
@all_cases("between", ["\n", "\n\n", " ", ""])
def test_a_changing_header_before_the_system_prompt_is_removed(between: str, role: str) -> None:
    messages = conversation_fields(chat(f"{HEADER}{between}You are kind. a=b;", role=role), {})["messages"]
    assert messages == chat("You are kind. a=b;", role=role)


def test_a_system_message_of_the_header_alone_is_left_out() -> None:
    messages = conversation_fields([{"role": "system", "content": HEADER}, *chat("Be kind.")], {})["messages"]
    assert messages == chat("Be kind.")


def test_the_header_is_text_elsewhere() -> None:
    messages = [*chat(f"Be kind.\n{HEADER}"), {"role": "user", "content": HEADER}]
    assert conversation_fields(messages, {})["messages"] == messages
