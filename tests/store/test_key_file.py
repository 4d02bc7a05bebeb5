"""The file of tenants: what is valid, who may write it, and what a change does while the gateway runs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from uma_trio import config
from uma_trio.cli import main
from uma_trio.cli.doctor.environment import check_keys
from uma_trio.gateway import key_file
from uma_trio.gateway.key_file import CurrentTenants, KeyFileError, editing, read
from uma_trio.gateway.limits import QuotaPeriod
from uma_trio.gateway.tenants import MAX_TENANTS, Key, Tenant, Tenants, new_key
from uma_trio.gateway.usage import UsageFile

SHA = "0" * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "keys.yaml"


def keys(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["keys", *map(str, args)])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def create(path: Path, name: str, *args: object) -> str:
    return keys("create", name, "--file", path, *args).strip()


def test_a_key_is_that_of_its_tenant_and_no_other_text_is(path: Path) -> None:
    alice, bob = create(path, "alice", "--rpm", 3), create(path, "bob")
    found = read(path)
    for text, name in ((alice, "alice"), (bob, "bob")):
        tenant = found.find(text)
        assert tenant is not None
        assert tenant.name == name
    changed = alice[:-1] + ("A" if alice[-1] != "A" else "B")
    for text in (
        "",
        "uma",
        changed,
        alice[:-1],
        alice + "A",
        alice.upper(),
        alice[:13] + bob[13:],
        "uma-00000000-" + "A" * 43,
        "ä" * 56,
        "\udc80",
    ):
        assert found.find(text) is None, text


def test_the_file_holds_no_key_and_nobody_else_can_read_it(path: Path) -> None:
    text = create(path, "alice")
    assert text.split("-", 2)[2] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_another_key_changes_only_the_limits_that_are_given(path: Path) -> None:
    create(path, "alice", "--rpm", 3, "--quota", "10/day", "--admin")
    create(path, "alice", "--tpm", 5, "--no-admin", "--weight", 2)
    alice = read(path).by_name["alice"]
    assert len(alice.keys) == 2
    assert (alice.requests_per_minute, alice.tokens_per_minute, alice.token_quota) == (3, 5, 10)
    assert (alice.quota_period, alice.admin, alice.weight) == ("day", False, 2)
    assert alice.principal.name == "tenant:alice"


def test_revoking_by_id_and_by_name(path: Path) -> None:
    first, second, other = create(path, "alice"), create(path, "alice"), create(path, "bob")
    assert keys("revoke", first.split("-")[1], "--file", path) == f"revoked {first.split('-')[1]}\n"
    found = read(path)
    assert [found.find(text) is None for text in (first, second, other)] == [True, False, False]
    keys("revoke", "alice", "--file", path)
    found = read(path)
    assert [found.find(text) is None for text in (first, second, other)] == [True, True, False]
    assert "alice" in keys("list", "--file", path)
    assert "nobody is neither" in keys("revoke", "bob", "nobody", "--file", path, code=1)
    assert read(path).find(other) is not None, "a command that fails changes nothing"


def stderr(*args: object) -> str:
    result = CliRunner().invoke(main, ["keys", *map(str, args)])
    assert result.exit_code == 0, result.output
    return result.stderr


def test_a_second_key_and_changed_limits_are_said(path: Path) -> None:
    assert "already" not in stderr("create", "alice", "--rpm", 3, "--file", path)
    said = stderr("create", "alice", "--file", path)
    assert "alice had a key already" in said
    assert "limits of alice" not in said
    said = stderr("create", "alice", "--rpm", 5, "--tpm", 9, "--file", path)
    assert "alice had 2 keys already" in said
    assert "are now: 5 requests/minute, 9 tokens/minute." in said


def test_revoking_the_last_key_warns(path: Path) -> None:
    alice = create(path, "alice")
    create(path, "bob")
    assert stderr("revoke", "bob", "--file", path) == ""
    assert "refuses everybody" in stderr("revoke", alice.split("-")[1], "--file", path)
    assert "alice had no key any more" in stderr("create", "alice", "--file", path)


def test_doctor_says_whether_there_are_keys(path: Path) -> None:
    settings = config.load(environment={"UMA_HTTP_KEYS": str(path)})
    [missing] = check_keys(settings)
    assert missing.verdict == "problem"
    create(path, "alice")
    [found] = check_keys(settings)
    assert (found.verdict, found.fix) == ("ok", None)
    stderr("revoke", "alice", "--file", path)
    [found] = check_keys(settings)
    assert found.verdict == "warning"
    assert "refuses everybody" in found.message


def test_the_list_says_what_was_used_of_a_quota(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMA_STATE_DIR", str(path.parent))
    create(path, "alice", "--quota", "5000/month")
    assert "5,000 tokens/month (0 used)" in keys("list", "--file", path)
    usage = UsageFile(path.parent / "usage.sqlite")
    usage.add("alice", QuotaPeriod.at(time.time(), "month").name, 1234)
    assert "5,000 tokens/month (1,234 used)" in keys("list", "--file", path)
    usage.close()


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["a b"], "is not a valid tenant name"),
        (["x" * 65], "is not a valid tenant name"),
        (["uid:0"], "is not a valid tenant name"),
        (["x", "--rpm", "0"], "requests_per_minute"),
        (["x", "--weight", "0"], "weight"),
        (["x", "--weight", "nan"], "weight"),
        (["x", "--quota", "10/year"], "a quota is for a day or a month"),
        (["x", "--quota", "many"], "expected a number of tokens"),
    ],
)
def test_limits_that_are_refused(path: Path, args: list[str], reason: str) -> None:
    result = CliRunner().invoke(main, ["keys", "create", "--file", str(path), *args])
    assert result.exit_code in (1, 2)
    assert reason in result.output
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("alice: {}", "expected one key, tenants:"),
        ("tenants: [alice]", "expected a name"),
        ("tenants: {alice: 3}", "alice: expected limits"),
        ("tenants: {alice: {rpm: 3}}", "unknown field `rpm`"),
        ("tenants: {alice: {name: bob}}", "alice: expected limits"),
        ("tenants: {alice: {admin: maybe}}", "admin"),
        ("tenants: {1: {}}", "'1' is not a valid tenant name"),
        ("tenants: {alice: {}, alice: {}}", "set in line 1 and again"),
        (f"tenants: {{a: {{keys: [{{id: 00000000, sha256: '{SHA}', created: x}}]}}}}", "id"),
        (
            "tenants:\n" + "".join(f"  {name}: {{keys: [{{id: '00000000', sha256: '{SHA}', created: x}}]}}\n" for name in "ab"),
            "b: the key 00000000 is there twice",
        ),
        ("tenants: {" + ", ".join(f"t{number}: {{}}" for number in range(MAX_TENANTS + 1)) + "}", "at most 1,000"),
        ("tenants: {", "is not YAML"),
    ],
)  # fmt: skip
def test_files_that_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(KeyFileError) as caught:
        read(path)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 500


def test_empty_files_have_no_tenants(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    for text in ("", "tenants:\n", "tenants: {}\n"):
        path.write_text(text)
        assert read(path).by_name == {}
    path.write_text("tenants: {alice: }")
    assert read(path).by_name == {"alice": Tenant(name="alice")}


def test_a_file_that_others_could_have_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("")
    for mode in (0o620, 0o602, 0o666):
        path.chmod(mode)
        with pytest.raises(KeyFileError, match="chmod 600"):
            read(path)
    path.chmod(0o644)
    read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user; run the tests as root")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("")
    os.chown(path, 12345, -1)
    with pytest.raises(KeyFileError, match="belongs to another user"):
        read(path)


def test_two_who_edit_at_once_lose_nothing(path: Path) -> None:
    def add(name: str) -> None:
        for number in range(5):
            with editing(path) as tenants:
                tenants[f"{name}{number}"] = Tenant(name=f"{name}{number}")

    threads = [threading.Thread(target=add, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read(path).by_name) == 20


def test_a_change_counts_at_once(path: Path) -> None:
    text = create(path, "alice")
    current = CurrentTenants(path)
    assert current.now() is current.now()
    for expected in (True, False):
        found = current.now()
        assert found is not None
        assert (found.find(text) is not None) is expected
        if expected:
            keys("revoke", "alice", "--file", path)


def test_a_file_that_becomes_unusable_changes_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = create(path, "alice")
    current = CurrentTenants(path)
    for spoil in (lambda: path.write_text("tenants: {"), lambda: path.chmod(0o666), path.unlink):
        spoil()
        for _ in range(3):
            found = current.now()
            assert found is not None
            assert found.find(text) is not None
    assert len(caplog.records) == 3, "each change is logged once"
    create(path, "bob")
    found = current.now()
    assert found is not None
    assert found.find(text) is None


def test_the_first_key_closes_an_open_gateway(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "default_path", lambda: path)
    current = CurrentTenants(None)
    assert current.now() is None
    path.parent.mkdir()
    path.write_text("tenants: {")
    for _ in range(2):
        found = current.now()
        assert found is not None, "an unusable file lets nobody in"
        assert found.by_name == {}


def test_a_file_that_is_named_must_exist(path: Path) -> None:
    with pytest.raises(KeyFileError, match="uma-trio keys create NAME"):
        CurrentTenants(path)


def test_ids_of_keys_are_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["aaaaaaaa", "aaaaaaaa", "bbbbbbbb"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(ids))
    _, first = new_key(Tenants({}), "2026-01-01")
    _, second = new_key(Tenants({"a": Tenant(name="a", keys=(first,))}), "2026-01-01")
    assert (first.id, second.id) == ("aaaaaaaa", "bbbbbbbb")
    assert isinstance(second, Key)
