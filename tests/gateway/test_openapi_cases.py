"""schemathesis makes requests from the OpenAPI document, valid and invalid ones, and compares the answers with it.

A few cases for each endpoint by default.  The full run, which takes some minutes:

    UMA_HTTP_CASES=10000 pytest -n 0 -s tests/gateway/test_openapi_cases.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.conftest import Gateway
from tests.support.real_daemon import ROOT, missing, real_daemon
from uma_trio.gateway.application import ENDPOINTS

CASES = int(os.environ.get("UMA_HTTP_CASES", "100"))
FULL = 5000
"""From this number of cases on, each keyword of each schema is tried too, in about 4,000 cases."""

COMMAND = (
    *(sys.executable, "-m", "schemathesis.cli", "run", "--continue-on-failure", "--no-shrink", "--no-color"),
    # a request that fits its schema may still be refused: JSON schema cannot say what the daemon's limits are
    *("--exclude-checks", "positive_data_acceptance", "--suppress-health-check", "all", "--request-timeout", "60"),
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_answer_is_as_documented(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    phases = "coverage,fuzzing" if CASES >= FULL else "fuzzing"
    each = -(-CASES // sum(endpoint.body is not None for endpoint in ENDPOINTS))
    with real_daemon("--http", "0", "--parallel", "8", "--default-max-tokens", "8", "--max-tokens", "32") as daemon:
        gateway = Gateway.of(daemon)
        command = (*COMMAND, "--phases", phases, "--max-examples", str(each), "--workers", "2")
        command = (*command, f"{gateway.url}/openapi.json")
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.support.controller_cases", "PYTHONPATH": str(ROOT)}
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
        assert found.returncode == 0, found.stdout + found.stderr
        generated = re.search(r"(\d+) generated", found.stdout)
        assert generated is not None, found.stdout
        print(f"{generated[1]} cases")
        assert int(generated[1]) >= CASES
        daemon.settled()
        assert "internal error" not in daemon.logs()
