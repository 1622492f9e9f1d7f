"""Tiny models, prompts of many lengths, and the greedy tokens that `transformers` generates."""

import functools
import random

import torch

from tests.support.layer_kinds import own_answer
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_NEW_TOKENS = 20 if DEVICE == "cuda" else 10


@functools.cache
def model(family):
    return tiny_model(family).to(DEVICE)


@functools.cache
def prompts():
    """Random prompts around every block boundary, some with a common beginning."""
    choice = random.Random(0)
    shared = [choice.randrange(VOCAB_SIZE) for _ in range(70)]
    lengths = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200]
    own = [[choice.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    return own + [shared + [choice.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 20, 58, 59)]


def reference(module, prompt):
    return own_answer(module, prompt, NUM_NEW_TOKENS)
