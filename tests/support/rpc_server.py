"""llama.cpp's RPC server in a child process: real devices for tests on a machine without a GPU.

Each device computes on this machine's CPU, in the server's process, with memory of its own.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.real_daemon import DIES_WITH_PARENT

LIMIT_S = 60.0

SERVER = """
import ctypes, sys
import llama_abi
from llama_abi.types import C

n_devices = int(sys.argv[1])
library = llama_abi.load()
backend = library.c.ggml_backend_reg_by_name(b"RPC")
address = library.c.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_rpc_start_server")
device = C.known["ggml_backend_dev_t"]
start = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(device)
)(address)
start(b"127.0.0.1:0", None, 1, n_devices, (device * n_devices)(*[library.device_pointer("CPU")] * n_devices))
"""


@contextlib.contextmanager
def rpc_server(n_devices: int = 1) -> Iterator[str]:
    """A server with ``n_devices`` devices; yields its endpoint.  Skips the test if the library has no RPC backend."""
    import llama_abi

    if not llama_abi.load().supports_rpc:
        pytest.skip("the library has no RPC backend: ./build_llama.sh builds one that has")
    command = [sys.executable, "-c", SERVER, str(n_devices)]
    if sys.platform == "linux":
        command = [*DIES_WITH_PARENT, *command]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as server:
        try:
            yield f"127.0.0.1:{_port(server)}"
        finally:
            server.kill()


def _port(server: subprocess.Popen[bytes]) -> int:
    """The port that the system has given to ``server``."""
    process = psutil.Process(server.pid)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            assert server.stderr is not None
            raise AssertionError(f"the RPC server has ended: {server.stderr.read().decode()}")
        for each in process.net_connections("tcp4"):
            if each.status == psutil.CONN_LISTEN:
                return int(each.laddr.port)
        time.sleep(0.01)
    raise AssertionError(f"the RPC server does not listen after {LIMIT_S} s")
