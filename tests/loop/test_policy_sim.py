"""The simulation of the scheduling policies runs, and no request starves."""

import csv
import subprocess
import sys
from pathlib import Path

import uma_trio

BENCH = Path(uma_trio.__file__).parent.parent / "benches/policy_sim.py"


def test_a_small_run_prints_both_policies_and_writes_csv(tmp_path: Path) -> None:
    file = tmp_path / "policy.csv"
    ran = subprocess.run(
        [sys.executable, BENCH, "--requests", "24", "--csv", file],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("cpu ")
    assert ran.stdout.rstrip().endswith("Nobody starved.")
    with file.open(newline="") as written:
        rows = list(csv.DictReader(written))
    assert {(row["device"], row["policy"]) for row in rows} == {
        (device, policy)
        for device in ("cpu", "gpu", "wide", "h100", "h200", "tiles")
        for policy in ("uma-trio", "fill the batch")
    }
    assert sum(int(row["requests"]) for row in rows) == 24 * 12


def test_a_burst_of_prompts_is_served_soon_and_no_stream_freezes(tmp_path: Path) -> None:
    file = tmp_path / "burst.csv"
    ran = subprocess.run(
        [sys.executable, BENCH, "--device", "cpu", "--burst", "32", "--csv", file],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "| uma-trio" in ran.stdout
    with file.open(newline="") as written:
        ours = next(row for row in csv.DictReader(written) if (row["policy"], row["class"]) == ("uma-trio", "normal"))
    assert int(ours["requests"]) == 32
    assert float(ours["ttft_max_ms"]) < 12_000, "without the rule for overdue prompts it is 14,600"
    assert float(ours["itl_max_ms"]) < 250


def test_a_router_that_keeps_conversations_together_saves_prefill() -> None:
    policies = "round-robin,session-header,prefix-hash,cache-aware,kv-aware"
    ran = subprocess.run(
        [
            sys.executable,
            BENCH.with_name("router_sim.py"),
            "--workers",
            "1,3",
            "--minutes",
            "0.25",
            "--policy",
            policies,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in ran.stdout.splitlines() if line[:2] == "| "]
    affinity = {row[0]: float(row[3]) for row in rows[2:]}
    assert list(affinity) == ["1 alone", *[f"3 {name}" for name in policies.split(",")]]
    assert affinity["1 alone"] > 0.99, "it computes nothing twice but the last token of a prompt that is known"
    assert all(affinity[f"3 {name}"] > 2 * affinity["3 round-robin"] for name in policies.split(",")[1:])
    assert len({row[1] for row in rows[3:]}) == 1, "all of them serve the same conversations"
