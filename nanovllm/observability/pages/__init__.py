"""Self-contained HTML pages, assembled from shared CSS and JavaScript."""

from __future__ import annotations

import re
from importlib import resources

_INCLUDE = re.compile(r"/\* include (?P<name>[a-z_/.]+\.(?:css|js)) \*/")


def read_page(name: str) -> str:
    """Return the page `name` with each "/* include NAME */" replaced by that file."""
    folder = resources.files(__name__)
    page = folder.joinpath(name).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda include: folder.joinpath(include["name"]).read_text(encoding="utf-8").rstrip(), page)
