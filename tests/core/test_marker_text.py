"""Forms that hold the text of special and added tokens: the output spells it, and ends where the form is complete."""

import functools
import json
import re

import pytest
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams, StructuredOutput
from nanovllm.features.grammar.compiler import GrammarCompiler
from nanovllm.features.grammar.vocabulary import makes_markers
from tests.support.structured import EOS, LARK, REGEX, SCHEMA, allowed, assert_equal_masks, model
from tests.support.tiny_models import VOCAB_SIZE, tiny_tokenizer

NAMES = {"<|system|>": "<s>", "<|user|>": "<think>", "<|end|>": "</s>"}  # a common start, text of a thought, end


@functools.cache
def tokenizer():
    """The tiny tokenizer whose markers have usual names, and where `<think>` is an added token as in Qwen 3."""
    text = tiny_tokenizer().backend_tokenizer.to_str()
    for old, new in NAMES.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    found = json.loads(text)
    next(token for token in found["added_tokens"] if token["content"] == "<think>")["special"] = False
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(found)), clean_up_tokenization_spaces=False
    )


def unigram():
    """A tokenizer whose model has the markers among its pieces, where it finds them in text."""
    pieces = [("<s>", 0.0), ("<think>", 0.0), ("<unk>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    pieces += [(chr(code), -5.0) for code in range(33, 127)]
    found = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    found.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    found.add_tokens([AddedToken(text, special=True, normalized=False) for text, _ in pieces[:4]])
    return PreTrainedTokenizerFast(tokenizer_object=found, clean_up_tokenization_spaces=False)


def schema_of(key, value):
    plain = {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    return {"type": "object", "properties": {key: value}, "required": [key], **plain}


ESCAPED = 'say "</s>"\\<think>\n</s>'
FORMS = {  # the form, and whether a text has it
    "const": ({"json_schema": {"const": "</s>"}}, lambda text: json.loads(text) == "</s>"),
    "escapes": ({"json_schema": {"const": ESCAPED}}, lambda text: json.loads(text) == ESCAPED),
    "enum": (
        {"json_schema": {"enum": ["<s>old</s> price", "<think>"]}},
        lambda text: json.loads(text) in ("<s>old</s> price", "<think>"),
    ),
    "property": (
        {"json_schema": schema_of("</s>", {"type": "boolean"})},
        lambda text: json.loads(text)["</s>"] in (True, False),
    ),
    "pattern": (
        {"json_schema": schema_of("html", {"type": "string", "pattern": "^<s>[a-z]{2,4}</s>$"})},
        lambda text: re.fullmatch("<s>[a-z]{2,4}</s>", json.loads(text)["html"]),
    ),
    "choice": ({"choice": ["<think>a", "yes</s>no"]}, lambda text: text in ("<think>a", "yes</s>no")),
    "whole choice": ({"choice": ["</s>"]}, lambda text: text == "</s>"),
    "regex": (
        {"regex": "<think>[a-z]{3}</think>(yes|no)</s>;"},
        lambda text: re.fullmatch("<think>[a-z]{3}</think>(yes|no)</s>;", text),
    ),
    "pieces": ({"regex": "(<|a)(/s|b)(>|c)d"}, lambda text: re.fullmatch("(<|a)(/s|b)(>|c)d", text)),
    "grammar": ({"grammar": 'start: "a" "</s>" b\nb: "<s>" | "<" "think" ">"\n'}, lambda text: text[:5] == "a</s>"),
}  # fmt: skip


@functools.cache
def llm(kind="bpe"):
    own = tokenizer() if kind == "bpe" else unigram()
    return LLM(model(), tokenizer=own, enforce_eager=True, block_size=16, num_kv_blocks=129, max_model_len=512)


def test_a_model_that_finds_markers_in_text_is_told_from_others():
    for own, found in ((tokenizer(), False), (unigram(), True)):
        assert makes_markers(GrammarCompiler(own, VOCAB_SIZE, [EOS]).vocabulary, own) is found


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_text_of_a_marker_is_spelled_and_the_form_is_completed(kind):
    forms = [StructuredOutput(**form) for form, _ in FORMS.values() for _ in range(2)]
    params = [SamplingParams(max_tokens=200, seed=n, structured_output=form) for n, form in enumerate(forms)]
    outputs = llm(kind).generate([[40, 50, 60]] * len(params), params)
    for (name, (_, has_form)), pair in zip(FORMS.items(), zip(outputs[::2], outputs[1::2], strict=True), strict=True):
        for output in pair:
            completion = output.outputs[0]
            assert completion.finish_reason == "stop", (name, output.error)
            assert has_form(completion.text), (name, completion.text)
            *spelled, last = completion.token_ids
            assert last == EOS and not {0, 1, 2, EOS} & set(spelled), name


def with_words(own):
    """The tokenizer with added tokens that are text, looked for behind a normalizer."""
    found = Tokenizer.from_str(own.backend_tokenizer.to_str())
    found.normalizer = normalizers.NFC()
    found.add_tokens([AddedToken("[word]", normalized=True), AddedToken("  ", normalized=True)])
    return PreTrainedTokenizerFast(tokenizer_object=found, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("words", [False, True], ids=["plain", "words"])
@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": SCHEMA},
        {"regex": REGEX},
        {"grammar": LARK},
        {"choice": ["a [word] of  it", "a [wordy] one", "<think", "naïve 你好 </s"]},
        {"grammar": 'start: "let me" <think> "see" <[2]> ("the quick" <s>)? "brown"\n'},
    ],
)
def test_masks_of_other_forms_are_those_of_llguidances_own_reading(form, words):
    own = with_words(tokenizer()) if words else tokenizer()
    ours, plain = (GrammarCompiler(own, VOCAB_SIZE, [EOS]) for _ in range(2))
    plain.__dict__["vocabulary"] = from_tokenizer(own, n_vocab=max(VOCAB_SIZE, len(own)), eos_token=[EOS])
    plain.__dict__["_is_forced"] = True
    assert_equal_masks((ours, plain), StructuredOutput(**form), num_texts=4, most=60)


def spelled(compiler, form, eos=EOS):
    """Tokens of a form with one text, the first that is allowed each time."""
    matcher, found = compiler.matcher(form).copy(), []
    while (token_id := allowed(matcher)[0]) != eos:
        matcher.consume(token_id)
        found.append(token_id)
    return found


def test_an_added_word_stays_one_token_and_blanks_beside_it_are_kept():
    own = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    own.add_tokens([AddedToken("[word]", lstrip=True, rstrip=True, normalized=False)])
    own = PreTrainedTokenizerFast(tokenizer_object=own, clean_up_tokenization_spaces=False)
    found = spelled(GrammarCompiler(own, VOCAB_SIZE, [EOS]), StructuredOutput(choice=("a  [word] b",)))
    assert VOCAB_SIZE in found and own.decode(found) == "a  [word] b"


def test_an_added_word_that_is_decoded_with_a_space_is_spelled():
    """As of Llama 2's kind of tokenizer, whose normalizer and decoder have spaces of their own."""
    pieces = ["<unk>", "<s>", "</s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    own = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    own.add_special_tokens([AddedToken(text, normalized=False) for text in pieces[:3]])
    own.add_tokens([AddedToken("[word]", normalized=True)])
    own = PreTrainedTokenizerFast(tokenizer_object=own, clean_up_tokenization_spaces=False)
    assert own.decode([*own.encode("a"), len(pieces)]) == "a [word]"
    compiler = GrammarCompiler(own, len(own), [2])
    for text in ("a[word]b", "x= [word];"):
        assert own.decode(spelled(compiler, StructuredOutput(choice=(text,)), eos=2)) == text


def test_an_end_of_sequence_that_is_an_added_word_is_no_text():
    own = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str().replace('"</s>"', '"[END]"'))
    own = json.loads(own.to_str())
    next(token for token in own["added_tokens"] if token["content"] == "[END]")["special"] = False
    own = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(own)))
    compiler = GrammarCompiler(own, VOCAB_SIZE, [EOS])
    matcher = compiler.matcher(StructuredOutput(json_schema={"type": "string"})).copy()
    matcher.consume(own.encode('"')[0])
    assert EOS not in allowed(matcher)
    assert own.decode(spelled(compiler, StructuredOutput(choice=("a[END]b",)))) == "a[END]b"
