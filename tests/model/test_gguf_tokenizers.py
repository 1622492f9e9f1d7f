"""Tokenizers of GGUF files: the ids and texts of `transformers`, from the same file and from the original."""

import gguf
import pytest
import transformers
from packaging.version import Version
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from nanovllm.models.gguf.config import generation_defaults
from nanovllm.models.gguf.file import GGUFFile
from nanovllm.models.gguf.tokenizer import build_tokenizer
from tests.support.tiny_gguf import add_tokenizer, finish, write_header
from tests.support.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_tokenizer

TEXTS = (
    "The quick brown fox",
    "answers 1234 questions, it's 5% more!",
    "Größe, café, naïve, 你好 \U0001f680",
    "def f(x):\n\treturn x  +  1\r\n\n\n   ok",
    "<|user|>What is the capital?<|end|><|assistant|>",
    "I'LL we've DON'T",
    "",
)


def byte_level(path, pre):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    add_tokenizer(writer, pre)
    return built(finish(writer))


def built(path):
    return build_tokenizer(GGUFFile(path))


def test_a_byte_level_tokenizer_is_the_one_that_the_file_was_made_from(tmp_path):
    ours, original = byte_level(tmp_path / "m.gguf", "gpt-2"), tiny_tokenizer(eos_token=SPECIAL_TOKENS[-1])
    for text in TEXTS:
        ids = ours(text)["input_ids"]
        assert ids == original(text)["input_ids"]
        assert ours.decode(ids) == text
        assert ours.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "hello"}]
    assert ours.chat_template == CHAT_TEMPLATE
    assert ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|user|>hello<|end|><|assistant|>"
    )
    assert ours.eos_token == SPECIAL_TOKENS[-1] and ours.model_max_length == 128


reads_files_rightly = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="older releases of transformers ignore the splitting and BOS that a file names",
)


@reads_files_rightly
@pytest.mark.parametrize("pre", ["qwen2", "dbrx", "gpt-4o", "tekken"])
def test_splittings_are_those_of_transformers_reading_of_the_file(tmp_path, pre):
    ours = byte_level(tmp_path / "m.gguf", pre)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text


def test_qwens_splitting_is_that_of_its_own_tokenizer():
    from nanovllm.models.gguf import tokenizer

    ours, theirs = (
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in (tokenizer._SPLITS["qwen2"], PRETOKENIZE_REGEX)
    )
    for text in TEXTS:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_llama_3_begins_with_bos_and_takes_whole_words(tmp_path):
    tokens = ["<|begin_of_text|>", "<|eot_id|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġx", "yz", "xyz"]
    types = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2)
    ours = built(write_header(
        tmp_path / "m.gguf", tokenizer_model="gpt2", tokenizer_pre="llama-bpe", token_list=tokens, token_types=types,
        token_merges=["y z"], bos_token_id=0, eos_token_id=1,
    ))  # fmt: skip
    assert ours.convert_ids_to_tokens(ours("xyz")["input_ids"]) == ["<|begin_of_text|>", "xyz"]  # not "x", "yz"
    assert ours.convert_ids_to_tokens(ours("xyz", add_special_tokens=False)["input_ids"]) == ["xyz"]


def sentencepiece(path, architecture, **flags):
    """A vocabulary with scores as SentencePiece writes them, learned from the tiny corpus."""
    from tests.support.tiny_models import _CORPUS

    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=220, show_progress=False))
    vocab = learned.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    control = ["<unk>", "<s>", "</s>"]
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = gguf.TokenType
    return built(write_header(
        path, architecture, tokenizer_model="llama", token_list=[*control, *in_bytes, *pieces],
        token_scores=[0.0] * 259 + [-float(index) for index in range(len(pieces))],
        token_types=[kinds.UNKNOWN, *[kinds.CONTROL] * 2, *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(pieces)],
        unk_token_id=0, bos_token_id=1, eos_token_id=2, **flags,
    ))  # fmt: skip


@reads_files_rightly
@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2"])
def test_sentencepiece_tokenizers_are_those_of_transformers(tmp_path, architecture):
    ours = sentencepiece(tmp_path / "m.gguf", architecture, add_bos_token=True)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS[:-1]:
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"], text
        assert ids[0] == 1
        assert ours.decode(ids, skip_special_tokens=True) == text


def test_a_space_before_a_text_and_bos_follow_the_files_flags(tmp_path):
    with_space = sentencepiece(tmp_path / "a.gguf", "llama")
    without = sentencepiece(tmp_path / "b.gguf", "llama", add_space_prefix=False, add_bos_token=False)
    assert with_space.convert_ids_to_tokens(with_space("The")["input_ids"])[:2] == ["<s>", "▁The"]
    assert "▁" not in "".join(without.convert_ids_to_tokens(without("The")["input_ids"]))
    assert with_space.decode(with_space(" The", add_special_tokens=False)["input_ids"]) == " The"


def test_control_tokens_that_end_a_turn_and_sampling_options_are_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list(["a", "<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|eot_id|>", "<end_of_turn>"])
    control = gguf.TokenType.CONTROL
    writer.add_token_types([gguf.TokenType.NORMAL, control, control, control, gguf.TokenType.NORMAL, control])
    writer.add_eos_token_id(2)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)
    assert generation_defaults(GGUFFile(finish(writer))) == {"eos_token_id": [2, 1, 5], "temperature": 0.5, "top_k": 20}


def test_several_chat_templates_are_kept_by_name(tmp_path):
    templates = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    fields = {"tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "token_list": ["a"], "chat_template": templates}
    found = built(write_header(tmp_path / "m.gguf", **fields)).chat_template
    assert found == {"default": "one", "tool_use": "two"}
