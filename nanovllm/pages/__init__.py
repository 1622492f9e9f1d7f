"""Pages of HTML that need nothing but themselves, put together from parts that several share."""

from __future__ import annotations

import re
from importlib import resources

_INCLUDE = re.compile(r"/\* include (?P<name>[a-z_]+\.(?:css|js)) \*/")


def read_page(name: str) -> str:
    """The page `name` of this package; each "/* include NAME */" in it is replaced by the part of that name."""
    folder = resources.files(__name__)
    page = folder.joinpath(name).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda include: folder.joinpath(include["name"]).read_text(encoding="utf-8").rstrip(), page)
