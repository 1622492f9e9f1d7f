"""Long texts in pieces: the tokens of the whole text for every tokenizer, and none behind the limit."""

import random
import unicodedata

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nanovllm.errors import PromptTooLongError
from nanovllm.features.composition.input_processor import build_input_processor
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.intake import pieces
from nanovllm.features.intake.pieces import PIECE_CHARS, Pieces, alternatives
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.requests import RequestLimits

GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    )
)  # fmt: skip
QWEN = GPT_4.replace(r"\p{N}{1,3}", r"\p{N}")
STAGED = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_level(**options):
    return pre_tokenizers.ByteLevel(**({"add_prefix_space": False, "use_regex": False} | options))


STAGES = {
    "gpt-2": [byte_level(use_regex=True)],
    "digits": [pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True)],
    "gpt-4": [split(GPT_4), byte_level()],
    "gpt-4o": [split(GPT_4O), byte_level()],
    "qwen": [split(QWEN), byte_level()],
    "staged": [*map(split, STAGED), byte_level()],
}
NOT_CUT = {
    "a prefix space": [byte_level(use_regex=True, add_prefix_space=True)],
    "an unknown pattern": [split(r"\S+\s|\s+"), byte_level()],
    "no pattern": [byte_level()],
    "one without white space": [split(r"\p{N}{1,3}"), byte_level()],
    "a pattern removed": [pre_tokenizers.Split(Regex(GPT_4), "removed"), byte_level()],
    "metaspace": [pre_tokenizers.Metaspace()],
}
PARTS = (
    "the sea", " was", " calm", "1912", "3", " 42", "a1b2", "foo.bar()", "don't",
    " we'll", "'s", "X'S", "\n", "\n\n  ", "  ",
    "   x", "\t", "\r\n", " \n ", "好的天气", "\uff0c", "。",
    "ひらがな", "カタカナ", "한국어", "café", "cafe\u0301", "e\u0301\u0327.", "Åb", "\u212b",
    "<tool_1>", "<tool_1",
    "tool_1>", "[end of turn]", "end of turn", " turn]", "<|im_end|>", "🙂", "👩\u200d👩", "---", "===",
    "://x/y?z=1", "ﬁ", "\u00a0", "\u3000x", "_x_", "A B C", "ß", "ij", "9.99", "(a)",
    "a)b", "a/b", "//\n", ";\n\n", "Hello, world!",
)  # fmt: skip


def texts(seed, count):
    source = random.Random(seed)
    for _ in range(count):
        some = source.sample(PARTS, source.randint(1, len(PARTS)))
        yield "".join(source.choices(some, k=source.randint(1, 120)))


def trained(stages, normalizer=None, *, with_ends=True):
    """A small vocabulary of a pre-tokenizer, with added tokens that hold places for cuts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(0, 400), trainer)
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<tool_1>", "[end of turn]", "fancy tool", "x1")]
    )
    if with_ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return tokenizer


def encode(tokenizer, text, limit=None):
    return Pieces(tokenizer).encode(
        text,
        lambda piece: tokenizer.encode(piece, add_special_tokens=False).ids,
        lambda given: tokenizer.encode(given).ids,
        limit,
    )


@pytest.mark.costly
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as it is", "nfc"])
@pytest.mark.parametrize("name", STAGES)
def test_pieces_have_the_tokens_of_the_whole_text(name, normalizer, monkeypatch):
    tokenizer = trained(STAGES[name], normalizer)
    monkeypatch.setattr(pieces, "PIECE_CHARS", 5)
    num_cuts = 0
    cut = Pieces._end_of_piece

    def watched(self, text, begin):
        nonlocal num_cuts
        end = cut(self, text, begin)
        num_cuts += end < len(text)
        return end

    monkeypatch.setattr(Pieces, "_end_of_piece", watched)
    for text in texts(1, 400):
        assert encode(tokenizer, text) == tokenizer.encode(text).ids, text
    assert num_cuts > 3000


@pytest.mark.costly
@pytest.mark.parametrize("stages", NOT_CUT.values(), ids=NOT_CUT)
def test_a_tokenizer_that_is_not_understood_gets_the_whole_text(stages):
    tokenizer = trained(stages)
    assert not Pieces(tokenizer)._can_cut
    text = "The sea was calm, " * PIECE_CHARS
    assert encode(tokenizer, text) == tokenizer.encode(text).ids


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_take_their_surroundings_forbid_cuts(flag):
    tokenizer = trained(STAGES["gpt-2"])
    tokenizer.add_tokens([AddedToken("<wide>", normalized=False, **{flag: True})])
    assert not Pieces(tokenizer)._can_cut


def test_what_is_no_tokenizer_of_the_library_is_given_the_whole_text():
    assert Pieces(None).encode("x" * 9000, list, lambda text: [1] * len(text), None) == [1] * 9000


def test_alternatives_are_the_parts_between_bars_outside_of_brackets():
    assert alternatives(r"(?i:'s|'t)|[|)]+|\||a") == [r"(?i:'s|'t)", "[|)]+", r"\|", "a"]


def test_a_text_is_tokenised_up_to_the_limit():
    tokenizer, num_chars = trained(STAGES["gpt-4"]), 0
    text = "the sea was calm, " * 10_000

    def counted(piece):
        nonlocal num_chars
        num_chars += len(piece)
        return tokenizer.encode(piece, add_special_tokens=False).ids

    with pytest.raises(PromptTooLongError, match=r"tokens in the first \d+ of its 180000 characters.* \(5000\)"):
        Pieces(tokenizer).encode(text, counted, counted, 5000)
    assert num_chars < 40_000


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as it is", "nfc"])
def test_bytes_that_show_it_refuse_a_text_before_it_is_tokenised(normalizer):
    tokenizer = trained(STAGES["gpt-4"], normalizer)
    longest = max(len(tokenizer.decode([number])) for number in range(tokenizer.get_vocab_size()))
    refused = "x" * (longest * 4 * 100)
    with pytest.raises(PromptTooLongError, match=rf"{len(refused)} bytes and no token has more than \d+"):
        Pieces(tokenizer).encode(refused, None, None, 100)


def test_text_that_normalisation_shrinks_is_not_refused_by_bytes_that_it_will_not_have():
    text = unicodedata.normalize("NFD", "각") * 1000
    plain, composing = (Pieces(trained(STAGES["gpt-4"], normalizer)) for normalizer in (None, normalizers.NFC()))
    limit = len(text.encode()) // (2 * plain._max_token_bytes)
    with pytest.raises(PromptTooLongError):
        plain._check_bytes(text, limit)
    composing._check_bytes(text, limit)


def test_no_composed_character_is_shorter_than_its_parts_by_more():
    for code in range(0x110000):
        if 0xD800 <= code < 0xE000:
            continue
        text = chr(code)
        composed = unicodedata.normalize("NFC", unicodedata.normalize("NFD", text))
        most = max(len(unicodedata.normalize("NFD", text).encode()), len(text.encode()))
        assert most <= pieces.BYTES_SHRUNK_BY_NFC * len(composed.encode())


def processor(max_model_len):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained(STAGES["gpt-2"]), eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    limits = RequestLimits(len(tokenizer), len(tokenizer), "Tiny", eos_token_ids=(1,))
    return build_input_processor(tokenizer, EngineConfig(max_model_len=max_model_len), limits), tokenizer


@pytest.mark.parametrize(
    "content", ["the sea was calm. " * 200, "<|im_end|> the sea was calm, a " * 120], ids=["plain", "marked"]
)
def test_conversations_are_rendered_to_the_tokens_of_the_whole(content, monkeypatch):
    own, _ = processor(64)
    conversation = [{"role": "user", "content": content}]
    in_pieces = own.parts.chat.apply_to(conversation)
    with pytest.raises(PromptTooLongError, match="characters"):
        own.parts.chat.apply_to(conversation, 64)
    monkeypatch.setattr(Pieces, "_can_cut", False)
    assert in_pieces == processor(64)[0].parts.chat.apply_to(conversation)


def test_a_prompt_that_is_cut_off_is_not_too_long():
    own, tokenizer = processor(64)
    text = "the sea was calm. " * 900
    with pytest.raises(PromptTooLongError):
        own.process_one("0", text, SamplingParams())
    made = own.process_one("0", text, SamplingParams(truncate_prompt_tokens=20, max_tokens=2))
    assert made.prompt_token_ids == tokenizer(text)["input_ids"][-20:]
