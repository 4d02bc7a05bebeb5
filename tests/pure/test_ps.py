"""What ``uma-trio ps`` shows of the answers of a daemon."""

from __future__ import annotations

from typing import Any

from uma_trio.cli import ps


def model(name: str, state: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "aliases": [], "state": state, **more}


def figures(used: int, reserved: int, **principals: dict[str, int]) -> dict[str, Any]:
    return {
        "kv": {"cells": 1000, "cells_used": used, "cells_reserved": reserved},
        "devices": {"CPU": {"weights_bytes": 0}, "CUDA0": {"weights_bytes": 7}},
        "principals": principals,
    }


def test_each_model_has_its_own_figures() -> None:
    snapshot = {
        "model": "a",
        **figures(3, 50, **{"tenant:x": {"running": 1}, "uid:0": {"running": 0}}),
        "models": {
            "a": {"in_use": 1, "waiting": 0, "idle_s": None},
            "b": {"in_use": 0, "waiting": 0, "idle_s": 7.0, "metrics": figures(0, 0)},
            "c": {"in_use": 0, "waiting": 2, "idle_s": None},
        },
    }
    models = [
        model("a", "ready", memory_bytes=1 << 20),
        model("b", "ready", memory_bytes=1 << 21, unloads_in_s=293.0),
        model("c", "loading", progress=0.25),
        model("d", "unloaded"),
        model("e", "failed", reason="it is damaged"),
    ]
    a, b, c, e = ps.rows(models, snapshot)
    assert (a["kv_cells_used"], a["kv_cells_reserved"], a["kv_cells"], a["users"]) == (3, 50, 1000, ["tenant:x"])
    assert (b["kv_cells_used"], b["kv_cells_reserved"], b["devices"]) == (0, 0, {"CUDA0": 7})
    assert (c["progress"], c["waiting"], c["kv_cells"], c["memory_bytes"]) == (0.25, 2, None, None)
    assert (e["state"], e["reason"]) == ("failed", "it is damaged")
    assert [ps._cells(row) for row in (a, b, c)] == [
        ("a", "ready", "1.0 MiB", "CUDA0", "3 used, 50 reserved of 1,000", "1 request of x", ""),
        ("b", "ready", "2.0 MiB", "CUDA0", "0 used, 0 reserved of 1,000", "nobody", "7 s, unloaded in 5 min"),
        ("c", "loading 25%", "", "", "", "2 waiting", ""),
    ]


def test_a_daemon_without_a_loaded_model() -> None:
    assert ps.rows([model("a", "unloaded")], {"model": "a", "models": {}}) == []
