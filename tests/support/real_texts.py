"""Real text as prompts: sentences, and slices of the repository's own files."""

from __future__ import annotations

import functools
from pathlib import Path

from transformers import AutoTokenizer

from nanovllm.model.default_model import ensure_default_model

ROOT = Path(__file__).parents[2]


SENTENCES = [
    "The",
    "Once upon a time",
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "To make a good cup of tea, first",
    "The three primary colours are",
    "In 1969, two people walked on",
    "A list of fruits: apples, pears,",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\n# the mean of each column\n",
    "Q: What is the largest planet of the solar system?\nA:",
    "The opposite of hot is cold. The opposite of tall is",
    "She opened the door, looked around the empty room, and",
    "Übergrößenträger ist ein deutsches Wort; auf Englisch heißt es",
    "1, 1, 2, 3, 5, 8, 13,",
]


# Slices of real prose and code: (LICENSE or a module of the package, first character, tokens).
SLICES = [
    ("LICENSE", 0, 40), ("LICENSE", 300, 63), ("LICENSE", 600, 64), ("LICENSE", 900, 65), ("LICENSE", 1200, 127),
    ("LICENSE", 1500, 128), ("LICENSE", 1800, 129), ("LICENSE", 0, 200), ("LICENSE", 0, 300), ("LICENSE", 0, 512),
    ("LICENSE", 0, 900), ("LICENSE", 400, 1100), ("LICENSE", 0, 1500), ("LICENSE", 5000, 90),
    ("scheduler", 0, 90), ("scheduler", 1000, 191), ("scheduler", 0, 350), ("scheduler", 2000, 700),
    ("block_manager", 0, 256), ("block_manager", 900, 257), ("block_manager", 0, 1024), ("sampling/sampler", 0, 77),
    ("sampling/sampler", 500, 448), ("sequence", 0, 160), ("sequence", 0, 640), ("config", 0, 1300),
]  # fmt: skip


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(ensure_default_model())


@functools.cache
def prompts() -> list[list[int]]:
    """42 prompts of 1 to 1,500 tokens."""
    texts = [tokenizer()(text)["input_ids"] for text in SENTENCES]
    for name, first, num_tokens in SLICES:
        path = ROOT / (name if name == "LICENSE" else f"nanovllm/{name}.py")
        texts.append(tokenizer()(path.read_text()[first:])["input_ids"][:num_tokens])
    return texts
