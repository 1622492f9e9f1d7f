"""A tiny model with an end of sequence, structured outputs of every kind, and `transformers` with llguidance itself."""

import functools
import json
import re

import jsonschema
import lark
import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import LogitsProcessor, LogitsProcessorList

from nanovllm import LLM, StructuredOutput
from nanovllm.features.grammar.compiler import GrammarCompiler
from nanovllm.features.structured_output import GrammarError
from tests.support.layer_kinds import own_answer
from tests.support.tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer

EOS = 3  # <|end|>
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "size", "count", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LARK = 'start: WORD ("," WORD)* "."\nWORD: /[a-z]{1,4}/\n'
REGEX = r"[0-9]{3}-[a-f]{2,5}(;|!)"
CHOICES = ["yes", "no", "perhaps (50 %)", "né\n"]
FORMS = {
    "json_schema": {"json_schema": SCHEMA},
    "regex": {"regex": REGEX},
    "grammar": {"grammar": LARK},
    "choice": {"choice": CHOICES},
    "json_object": {"json_object": True},
}


def form(kind):
    return StructuredOutput(**FORMS[kind])


def check_text(kind, text):
    """Whether a complete output is right, by others than llguidance."""
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "json_object":
        assert isinstance(json.loads(text), dict)
    elif kind == "regex":
        assert re.fullmatch(REGEX, text)
    elif kind == "choice":
        assert text in CHOICES
    else:
        lark.Lark(LARK).parse(text)


@functools.cache
def model(family="llama"):
    return tiny_model(family, eos_token_id=EOS)


def open_llm(**options):
    given = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 129, "max_model_len": 512} | options
    return LLM(model(), tokenizer=tiny_tokenizer(), **given)


class Grammar(LogitsProcessor):
    """llguidance in `transformers`, by nothing of ours; for one row."""

    def __init__(self, vocabulary, grammar, num_prompt_tokens):
        self._matcher, self._num_tokens = LLMatcher(vocabulary, grammar), num_prompt_tokens

    def __call__(self, input_ids, scores):
        for token_id in input_ids[0, self._num_tokens :].tolist():
            assert self._matcher.consume_token(token_id)
        self._num_tokens = input_ids.shape[1]
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        return scores.masked_fill(allowed[: scores.shape[1]] == 0, -torch.inf)


def grammar_of(kind):
    given = FORMS[kind]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(given["regex"])
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(given["grammar"])
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in given["choice"]))
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema(
            {"type": "object", "x-guidance": {"whitespace_pattern": "\\n?[ \\t]{0,24}"}}
        )
    return LLMatcher.grammar_from_json_schema(given["json_schema"])


def reference(model, tokenizer, kind, prompt, max_tokens, *, eos=EOS, **options):
    """The greedy tokens of `transformers` with llguidance as its logits processor."""
    vocabulary = from_tokenizer(tokenizer, n_vocab=model.config.vocab_size, eos_token=eos)
    processors = LogitsProcessorList([Grammar(vocabulary, grammar_of(kind), len(prompt))])
    return own_answer(model, prompt, max_tokens, pad_token_id=eos, logits_processor=processors, **options)


def allowed(matcher):
    """Ids of the tokens that may come next."""
    mask = np.zeros(matcher.num_words, np.int32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def assert_equal_masks(compilers, form, *, num_texts, most):
    """Of random texts of the form, of at most so many tokens."""
    chance = np.random.default_rng(0)
    for _ in range(num_texts):
        matchers = [compiler.matcher(form).copy() for compiler in compilers]
        for _ in range(most):
            one, other = map(allowed, matchers)
            assert one == other
            if one == [EOS]:
                break
            token_id = int(chance.choice([token_id for token_id in one if token_id != EOS]))
            for matcher in matchers:
                matcher.consume(token_id)


@functools.cache
def grammars():
    """The compiler of the tiny tokenizer, shared by tests that look at forms alone."""
    return GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE, (EOS,))


def is_document(form, text):
    """Whether the text is a complete output of the form, token by token."""
    matcher = grammars().matcher(form).copy()
    try:
        for token_id in tiny_tokenizer().encode(text, add_special_tokens=False):
            matcher.consume(token_id)
    except GrammarError:
        return False
    return matcher.is_complete()
