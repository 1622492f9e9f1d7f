"""A server of the embedded model, in a process of its own, for the recipes of docs/guide/clients.md: `.ci/clients`."""

import socket
import subprocess
import sys
import time
import urllib.request

import pytest


@pytest.fixture(scope="session")
def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nanovllm.cli", "serve", "--port", str(port), "--max-model-len", "2048", "--no-ui"]
    server = subprocess.Popen(command)
    try:
        for _ in range(1200):
            if server.poll() is not None:
                pytest.fail(f"the server ended with {server.returncode}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0)
                break
            except OSError:
                time.sleep(0.25)
        else:
            pytest.fail("the server has not begun to answer")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60.0)
