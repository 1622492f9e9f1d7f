"""Programs whose C++ kernels are compiled with AddressSanitizer."""

import os
import subprocess
import sys
import textwrap


def check_sanitized(script, cache):
    """Run a program that prints "no complaints" at its end; `cache` gets the kernels that it compiles."""
    library = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = os.environ | {
        "LD_PRELOAD": library.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "NANOVLLM_CACHE": str(cache),
    }
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "no complaints", done.stderr[-3000:]
