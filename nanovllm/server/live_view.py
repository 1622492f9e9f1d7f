"""The live view at /: a page to ask the model, and beside it the engine as it runs."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache

from nanovllm.pages import read_page


@cache
def live_page() -> tuple[str, str]:
    """The page, and the content security policy under which it runs: its own script, its own style, its own server."""
    page = read_page("live.html")
    (script,), (style,) = (re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("script", "style"))
    sources = {"script-src": f"'{_digest(script)}'", "style-src": f"'{_digest(style)}'", "connect-src": "'self'"}
    closed = {name: "'none'" for name in ("default-src", "base-uri", "form-action", "frame-ancestors")}
    policy = "; ".join(f"{name} {value}" for name, value in {**closed, **sources, "img-src": "data:"}.items())
    return page, policy


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
