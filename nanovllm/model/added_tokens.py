"""The added tokens of a `tokenizer.json`, without the vocabulary behind them.

`transformers` parses the whole file for them, 3 MB in 40 ms, and leaves it to the Rust library to parse it again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_OPTION = "added_tokens_decoder"  # of `from_pretrained`, and of tokenizer_config.json
_KEY = '"added_tokens"'
_OTHERS = ("special_tokens_map.json", "added_tokens.json")  # which the library reads only without the option
_MOST_CHARACTERS = 2**20  # of the file's beginning, where the library writes them


def added_tokens_option(source: str) -> dict[str, Any]:
    """An option of `AutoTokenizer.from_pretrained` that says what it would find in the file; none if in doubt."""
    folder = Path(source)
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        is_plain = config.get("tokenizer_class") == "TokenizersBackend" and not {_OPTION, "auto_map"} & config.keys()
        if not is_plain or any((folder / name).exists() for name in _OTHERS):
            return {}
        with (folder / "tokenizer.json").open(encoding="utf-8") as file:
            beginning = file.read(_MOST_CHARACTERS)
        before, key, behind = beginning.partition(_KEY)
        whole = json.loads(before.rstrip().removesuffix(",") + "}")  # else the key is within something else
        if not key or not isinstance(whole, dict):
            return {}
        tokens, _ = json.JSONDecoder().raw_decode(behind.lstrip().removeprefix(":").lstrip())
        return {_OPTION: {token.pop("id"): token for token in tokens}}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # which the library names, if it is an error
        return {}
