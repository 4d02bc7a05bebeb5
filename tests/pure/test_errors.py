"""The tree of errors: codes, statuses and docstrings."""

import ast
import inspect
import re

from tests.support.cases import all_cases
from uma_trio import errors
from uma_trio.errors import (
    AnswerError,
    ControllerRequestError,
    LimitError,
    ModelRequestError,
    ProtocolError,
    RuntimeFault,
    SessionError,
    UmaError,
    all_errors,
)
from uma_trio.protocol.events import Failure

CODE = re.compile(r"E_(PROTO|LIMIT|SESSION|ANSWER|RUNTIME|MODEL|CONSTRAINT|CONTROLLER|IO)(_[A-Z]+)+")


def test_all_errors_finds_every_class_in_the_module() -> None:
    written = [
        node.name
        for node in ast.parse(inspect.getsource(errors)).body
        if isinstance(node, ast.ClassDef)
        and any(isinstance(line, ast.Assign) and line.targets[0].id == "code" for line in node.body)  # type: ignore[attr-defined]
    ]
    assert sorted(written) == sorted(cls.__name__ for cls in all_errors())
    assert len(written) > 15


def test_codes_are_unique_and_prefixed_by_branch() -> None:
    codes = [cls.code for cls in all_errors()]
    assert len(set(codes)) == len(codes)
    for cls in all_errors():
        assert CODE.fullmatch(cls.code), cls
        branch = {
            ProtocolError: "E_PROTO_",
            LimitError: "E_LIMIT_",
            SessionError: "E_SESSION_",
            AnswerError: "E_ANSWER_",
            ModelRequestError: ("E_MODEL_", "E_CONSTRAINT_"),
            ControllerRequestError: "E_CONTROLLER_",
            RuntimeFault: ("E_RUNTIME_", "E_MODEL_", "E_CONTROLLER_", "E_IO_"),
        }
        [prefix] = [prefix for base, prefix in branch.items() if issubclass(cls, base)]
        assert cls.code.startswith(prefix)


def test_codes_that_clients_rely_on() -> None:
    assert {
        "E_PROTO_FRAME_TOO_LARGE",
        "E_PROTO_INVALID_JSON",
        "E_PROTO_BAD_REQUEST",
        "E_LIMIT_PROMPT_TOO_LARGE",
        "E_RUNTIME_DECODE",
    } <= {cls.code for cls in all_errors()}


@all_cases("cls", all_errors())
def test_each_error_has_a_docstring_and_a_fitting_status(cls: type[UmaError]) -> None:
    assert cls.__doc__
    assert cls.__doc__.endswith(".")
    if issubclass(cls, ProtocolError):
        assert 400 <= cls.http_status < 500
    elif issubclass(cls, LimitError):
        assert cls.http_status in (400, 408, 413, 429, 504)
    elif issubclass(cls, ModelRequestError | ControllerRequestError):
        assert cls.http_status in (400, 404)
    elif issubclass(cls, SessionError | AnswerError):
        assert cls.http_status in (404, 409)
    else:
        assert cls.http_status >= 499


@all_cases("cls", all_errors())
def test_each_error_becomes_an_event(cls: type[UmaError]) -> None:
    error = cls("what happened")
    assert Failure.of(error) == Failure(code=cls.code, message="what happened")
    error.request_id, error.retry_after_ms = "r1", 250
    event = Failure.of(error, metadata={"k": 1})
    assert (event.id, event.retry_after_ms, event.metadata) == ("r1", 250, {"k": 1})


def test_attributes_are_per_instance() -> None:
    first = errors.Busy("one")
    first.request_id = "r1"
    assert errors.Busy("two").request_id is None


def test_branches_have_no_code() -> None:
    for branch in (UmaError, ProtocolError, LimitError, RuntimeFault):
        assert "code" not in vars(branch)
        assert branch not in all_errors()
