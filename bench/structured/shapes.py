"""A checkpoint in the shape of Qwen3-0.6B with random weights and a tokenizer of its size that llguidance reads."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1] / "machines"))
from random_models import SHAPES, checkpoint

END = "<|endoftext|>"
_WORD = re.compile(r" ?[A-Za-z_]+|[0-9]{1,3}| ?[^\sA-Za-z0-9_]{1,6}|\s{1,12}")


def wide_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """Bytes, and words of Python's standard library with their beginnings, as tokens; good for decoding alone."""
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        for word in dict.fromkeys(_WORD.findall(path.read_text(encoding="utf-8", errors="ignore"))):
            mapped = as_bytes.pre_tokenize_str(word)[0][0]
            words |= dict.fromkeys(mapped[:length] for length in range(2, len(mapped) + 1))
        if len(words) >= num_tokens:
            break
    if len(words) < num_tokens - 1:
        raise RuntimeError(f"the standard library has words for {len(words)} tokens, not {num_tokens}")
    vocabulary = {word: number for number, word in enumerate(list(words)[: num_tokens - 1])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = as_bytes, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def text_checkpoint(shape: str) -> Path:
    """A folder of its own, whose weights are those of `random_models.checkpoint`."""
    folder = Path(tempfile.mkdtemp(prefix=f"nanovllm-text-{shape}-"))
    for path in checkpoint(shape).iterdir():
        (folder / path.name).symlink_to(path)
    tokenizer = wide_tokenizer(SHAPES[shape]["vocab_size"])
    tokenizer.save_pretrained(folder)
    config = folder / "generation_config.json"
    config.unlink(missing_ok=True)
    config.write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    return folder
