"""schemathesis makes requests from the OpenAPI document, valid and invalid ones, and compares the answers with it.

A few cases for each endpoint by default.  The full run takes some minutes:

    pytest --profile thorough -n 0 -s tests/gateway/test_openapi_cases.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.conftest import Gateway
from tests.support.profile import amount, is_thorough
from tests.support.real_daemon import ROOT, missing, real_daemon
from uma_trio.gateway.application import ENDPOINTS

CASES = amount(quick=100, thorough=10_000)
PHASES = "coverage,fuzzing" if is_thorough() else "fuzzing"
"""The coverage tries each keyword of each schema, in about 4,000 cases."""

CONFIGURATION = """
[checks]
negative_data_rejection.expected-statuses = [400, 401, 403, 404, 405, 406, 408, 409, 411, 413, 415, 422, 428, 429, "5xx"]
"""
"""A request that does not fit its schema may be refused for its size first."""

COMMAND = (
    *(sys.executable, "-m", "schemathesis.cli", "run", "--continue-on-failure", "--no-shrink", "--no-color"),
    # a request that fits its schema may still be refused: JSON schema cannot say what the daemon's limits are
    *("--exclude-checks", "positive_data_acceptance", "--suppress-health-check", "all", "--request-timeout", "60"),
)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_every_answer_is_as_documented(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    each = -(-CASES // sum(endpoint.body is not None for endpoint in ENDPOINTS))
    short = ("--parallel", "8", "--default-max-tokens", "8", "--max-tokens", "32")
    nothing = ("--offline", "--models-dir", str(tmp_path / "models"))  # cases delete models, and pull some
    with real_daemon("--http", "0", *short, *nothing) as daemon:
        gateway = Gateway.of(daemon)
        command = (*COMMAND, "--phases", PHASES, "--max-examples", str(each), "--workers", "1")
        if not is_thorough():
            command = (*command, "--seed", "1")  # the same cases in every run
        (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.support.controller_cases", "PYTHONPATH": str(ROOT)}
        found = subprocess.run(
            [*command, f"{gateway.url}/openapi.json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert found.returncode == 0, found.stdout + found.stderr
        generated = re.search(r"(\d+) generated", found.stdout)
        assert generated is not None, found.stdout
        print(f"{generated[1]} cases")
        assert int(generated[1]) >= CASES
        daemon.settled()
        assert "internal error" not in daemon.logs()
