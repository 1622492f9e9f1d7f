"""Real text as prompts: sentences, slices of the licence, slices of Python modules."""

import functools
from pathlib import Path

from transformers import AutoTokenizer

from nanovllm.models.default_model import ensure_default_model

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


# Slices of prose: (first character of the licence, tokens).
PROSE = [
    (0, 40), (300, 63), (600, 64), (900, 65), (1200, 127), (1500, 128), (1800, 129), (0, 200), (0, 300), (0, 512),
    (0, 900), (400, 1100), (0, 1500), (5000, 90),
]  # fmt: skip
# Tokens of each text in real_code.txt: copies of Python modules, since a comparison of errors needs texts that
# do not change.
CODE = [90, 191, 350, 700, 256, 257, 1024, 77, 448, 160, 640, 1300]


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(ensure_default_model())


@functools.cache
def prompts():
    """42 prompts of 1 to 1,500 tokens."""
    texts = [tokenizer()(text)["input_ids"] for text in SENTENCES]
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    code = Path(__file__).with_name("real_code.txt").read_text(encoding="utf-8").split("\f")
    slices = [(licence[first:], num_tokens) for first, num_tokens in PROSE] + list(zip(code, CODE, strict=True))
    return texts + [tokenizer()(text)["input_ids"][:num_tokens] for text, num_tokens in slices]
