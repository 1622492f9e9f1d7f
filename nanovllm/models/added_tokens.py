"""Added tokens of a `tokenizer.json`, read without its vocabulary.

`transformers` parses the whole file for them (3 MB in 40 ms), then the Rust library parses it again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_OPTION = "added_tokens_decoder"  # name in `from_pretrained` and in tokenizer_config.json
_KEY = '"added_tokens"'
_LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")  # the library ignores them if the option is given
_MOST_CHARACTERS = 2**20  # the library writes added tokens at the start of the file; no more is read


def added_tokens_option(source: str) -> dict[str, Any]:
    """Added tokens as an option of `AutoTokenizer.from_pretrained`; empty if the file is in any way unusual."""
    folder = Path(source)
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        is_plain = config.get("tokenizer_class") == "TokenizersBackend" and not {_OPTION, "auto_map"} & config.keys()
        if not is_plain or any((folder / name).exists() for name in _LEGACY_FILES):
            return {}
        with (folder / "tokenizer.json").open(encoding="utf-8") as file:
            beginning = file.read(_MOST_CHARACTERS)
        before, key, after = beginning.partition(_KEY)
        whole = json.loads(before.rstrip().removesuffix(",") + "}")  # fails if the key is nested in another value
        if not key or not isinstance(whole, dict):
            return {}
        tokens, _ = json.JSONDecoder().raw_decode(after.lstrip().removeprefix(":").lstrip())
        return {_OPTION: {token.pop("id"): token for token in tokens}}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # the library reports a real error itself
        return {}
