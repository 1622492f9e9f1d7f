"""Runs the command as `python -m nanovllm.cli`."""

from __future__ import annotations

import sys

from nanovllm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
