"""Whole numbers with units: 512MiB, 4k, 2.5GB."""

from __future__ import annotations

import re
from decimal import Decimal

# Like vLLM: lower case means powers of 1000, upper case powers of 1024; KB, MB, GB and TB are powers of 1000.
DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
UNITS = (
    {"": 1, "B": 1}
    | DECIMAL
    | BINARY
    | {f"{name.upper()}B": size for name, size in DECIMAL.items()}
    | {f"{name}B": size for name, size in DECIMAL.items()}
    | {f"{name}i": size for name, size in BINARY.items()}
    | {f"{name}iB": size for name, size in BINARY.items()}
)
FORMS = "4k (4,000), 4K or 4Ki (4,096), 512MiB or 2GB"
_NUMBER = re.compile(r"([+-]?[\d_]+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


def whole_number(text: str) -> int:
    """Parse a number such as "512", "4k" or "512MiB"; raises ValueError for other text."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in UNITS or not match[1].strip("_+-"):
        raise ValueError(f"{text!r} is not a whole number; units are written as in {FORMS}.")
    number = Decimal(match[1].replace("_", "")) * UNITS[match[2]]
    if number != int(number):
        raise ValueError(f"{text!r} is {number.normalize():f}, which is not a whole number.")
    return int(number)
