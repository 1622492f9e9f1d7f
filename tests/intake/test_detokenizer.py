"""Incremental detokenization: equal to decoding at once, never half a character, in linear time."""

import functools
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from nanovllm.features.intake.token_texts import _known, detokenizer_of, plain_backend, token_texts
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.outputs import OutputKind
from nanovllm.requests import decode
from nanovllm.responses import Sample
from nanovllm.sequence import NewRequest, Sequence
from tests.support.tiny_models import SPECIAL_TOKENS, tiny_tokenizer


@functools.cache
def tokenizer():
    return tiny_tokenizer()


class ByteFallback:
    """Words with spaces in front, bytes for the rest, the first space stripped: how SentencePiece models decode."""

    words = ("▁Hello", "▁world", "▁", "s", ",", "▁é")

    def __init__(self):
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
        vocabulary |= {word: 256 + number for number, word in enumerate(self.words)}
        self._tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
        self._tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )

    def decode(self, token_ids, skip_special_tokens=True, **_):
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


class Counting:
    """A tokenizer that counts the tokens it was asked to decode."""

    def __init__(self, counted):
        self.counted, self.num_calls, self.num_tokens = counted, 0, 0

    def decode(self, token_ids, **options):
        self.num_calls += 1
        self.num_tokens += len(token_ids)
        return self.counted.decode(token_ids, **options)


def pieces(token_ids, using):
    """The text that each token appended."""
    detokenizer, texts = detokenizer_of(using), [""]
    for token_id in token_ids:
        detokenizer.add(token_id)
        assert detokenizer.text.startswith(texts[-1])
        texts.append(detokenizer.text)
    return [after[len(before) :] for before, after in itertools.pairwise(texts)]


def bytes_as_tokens(text):
    """One token a byte, whatever merges the tokenizer knows."""
    spelled = [token for word in tokenizer().tokenize(text) for token in word]  # one character of the alphabet a byte
    return tokenizer().convert_tokens_to_ids(spelled)


VALID_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
RICH_TEXT = st.lists(st.sampled_from(["a", " ", "é", "你", "😀", "👩‍👩‍👧", "🇫🇷", "e\u0301", "\n", "the capital"])).map(
    "".join
)


def test_a_replacement_character_that_the_model_did_say_is_shown():
    text = "odd \ufffd sign"
    assert "".join(pieces(bytes_as_tokens(text), tokenizer())) == text


@pytest.mark.parametrize("count", range(1, 15))
def test_a_whole_character_behind_any_number_of_invalid_bytes_is_shown(count):
    lone = bytes_as_tokens("é")[0]
    token_ids = [lone] * count + bytes_as_tokens("😀 and on")
    assert "".join(pieces(token_ids, tokenizer())) == decode(tokenizer(), token_ids)


def pieces_and_rest(token_ids, using):
    """The text that each token appended, and what is left once no more come."""
    detokenizer = detokenizer_of(using)
    for token_id in token_ids:
        detokenizer.add(token_id)
    return [*pieces(token_ids, using), detokenizer.unfinished_text()]


@given(
    st.lists(st.integers(0, 511) | st.sampled_from([bytes_as_tokens("😀")[0], bytes_as_tokens("é")[1]]), max_size=60)
    | (VALID_TEXT | RICH_TEXT).map(bytes_as_tokens)
)
@example(bytes_as_tokens("😀" * 20))
@example([])
@settings(deadline=None, max_examples=200)
def test_any_tokens_join_to_the_decoding_of_the_whole_once_they_end(token_ids):
    """Half characters, invalid bytes and special tokens included."""
    assert "".join(pieces_and_rest(token_ids, tokenizer())) == decode(tokenizer(), token_ids)


@given(st.lists(st.sampled_from(range(256, 262)) | st.sampled_from(list("né 😀".encode())), max_size=30))
@settings(deadline=None, max_examples=300)
def test_words_and_bytes_of_a_sentencepiece_decoder_join_to_the_decoding_of_the_whole(token_ids):
    whole = decode(ByteFallback(), token_ids)
    if "\ufffd" not in whole:  # one invalid byte makes this decoder replace the valid ones beside it too
        assert "".join(pieces(token_ids, ByteFallback())) == whole


@given(st.lists(st.integers(0, 511) | st.sampled_from(bytes_as_tokens("é😀")), max_size=60), st.booleans())
@settings(deadline=None, max_examples=300)
def test_texts_of_single_tokens_bring_each_piece_as_decoding_does(token_ids, skips):
    """Half characters, invalid bytes and special tokens included."""
    by_texts, by_decoding = (detokenizer_of(tokenizer(), skip_special_tokens=skips) for _ in range(2))
    assert by_texts._texts is not None
    by_decoding._texts = None
    for token_id in token_ids:
        by_texts.add(token_id)
        by_decoding.add(token_id)
        assert by_texts.text == by_decoding.text
        assert by_texts.unfinished_text() == by_decoding.unfinished_text()


def test_the_text_of_a_token_is_looked_up_once_for_all_requests():
    own, calls = tiny_tokenizer(), []
    token_ids = own("the capital of")["input_ids"]
    backend = plain_backend(own)
    texts = token_texts(own, backend, skip_special_tokens=True)
    assert texts is not None
    texts._decode = lambda token_ids: calls.append(token_ids) or backend.decode(token_ids)
    for _ in range(3):
        assert "".join(pieces(token_ids, own)) == "the capital of"
    assert sorted(calls) == sorted([token_id] for token_id in set(token_ids))
    assert token_texts(own, backend, skip_special_tokens=False) is not texts


def test_only_byte_level_decoders_have_texts_of_single_tokens():
    own = tiny_tokenizer()
    for decoder in (decoders.Metaspace(), decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), None):
        own.backend_tokenizer.decoder = decoder
        assert token_texts(own, plain_backend(own), skip_special_tokens=True) is None
        _known.clear()


def test_a_tokenizer_that_decodes_in_its_own_way_has_no_texts_of_single_tokens():
    own = tiny_tokenizer()
    own.decode = lambda token_ids, **_: "x" * len(token_ids)
    assert plain_backend(own) is None and pieces([5, 6], own) == ["x", "x"]


class Segments:
    """A byte-level tokenizer whose tokens are any strings of bytes."""

    def __init__(self, segments):
        self.segments = segments

    def decode(self, token_ids, **_):
        return b"".join(self.segments[token_id] for token_id in token_ids).decode(errors="replace")


def segments_of(text, cuts):
    """Its bytes, cut into pieces of these lengths, in turn, as far as they go, and single bytes behind them."""
    data, segments = text.encode(), []
    for size in itertools.chain(cuts, itertools.repeat(1)):
        if not data:
            return segments
        segments.append(data[:size])
        data = data[size:]


@given(VALID_TEXT | RICH_TEXT, st.lists(st.integers(1, 6), max_size=40))
@example("a😀é你!", [2, 4, 3, 1])
@settings(deadline=None, max_examples=300)
def test_wherever_tokens_cut_a_text_its_whole_characters_are_shown_at_once(text, cuts):
    valid = text.replace("\ufffd", "")
    segments = segments_of(valid, cuts)
    shown = itertools.accumulate(pieces(list(range(len(segments))), Segments(segments)))
    known = itertools.accumulate(segments)
    assert [*shown] == [data.decode(errors="ignore") for data in known]


@given(
    st.lists(st.binary(min_size=1, max_size=5) | st.sampled_from([b"a\xc3", b"\xa9", b"\xa9b\xf0\x9f"]), max_size=30)
)
@settings(deadline=None, max_examples=300)
def test_tokens_of_any_bytes_join_to_the_decoding_of_the_whole_once_they_end(segments):
    using, token_ids = Segments(segments), list(range(len(segments)))
    assert "".join(pieces_and_rest(token_ids, using)) == using.decode(token_ids)


# ------------------------------------------------------------------------------------------------------- stop strings


def stream_of(token_ids, stop, kind, using=None):
    """What a request that draws these tokens shows after each of them, up to its end."""
    params = SamplingParams(stop=stop, max_tokens=len(token_ids))
    request = NewRequest("a", [5], params, output_kind=kind)
    sequence = Sequence(request, arrival=0, max_model_len=1000)
    sample = Sample(request, sequence, using or tokenizer())
    shown = []
    for token_id in token_ids:
        sequence.token_ids.append(token_id)
        is_stopped = sample.advance(0.0) is not None
        sequence.is_finished = is_stopped or len(shown) == len(token_ids) - 1
        shown.append(sample.output(0.0).outputs[0])
        if is_stopped:
            break
    return shown


PARTS = st.lists(
    st.sampled_from(["a", "b", "ab", "ba", "abab", "é", "😀", " ", "\n\n", "the "]), min_size=1, max_size=20
)


@given(PARTS, st.lists(PARTS.map("".join), min_size=1, max_size=3))
@example(["abab", "a"], ["abab" * 10])  # longer than all there is: its beginning is held back too
@settings(deadline=None, max_examples=300)
def test_a_stream_shows_no_part_of_a_stop_string_and_its_deltas_join(parts, stop):
    text = "".join(parts)
    found = [text.find(item) for item in stop if item in text]
    token_ids = bytes_as_tokens(text)
    whole = stream_of(token_ids, stop, OutputKind.CUMULATIVE)
    if not found:
        assert whole[-1].text == text
    else:  # the first to be completed ends it; another may begin before it
        assert whole[-1].text in [text[:at] for at in found]
    assert all(whole[-1].text.startswith(completion.text) for completion in whole)
    deltas = stream_of(token_ids, stop, OutputKind.DELTA)
    assert "".join(completion.text for completion in deltas) == whole[-1].text
    assert [token_id for completion in deltas for token_id in completion.token_ids] == whole[-1].token_ids


@given(PARTS, st.lists(PARTS.map("".join), min_size=1, max_size=3), st.lists(st.integers(1, 6), max_size=40))
@example(["ab", "é"], ["ab"], [3])
@example(["ab", "é"], ["ab"], [1, 2, 1])
@settings(deadline=None, max_examples=200)
def test_a_stop_string_ends_a_request_with_the_token_that_completes_it_wherever_tokens_cut(parts, stop, cuts):
    text = "".join(parts)
    segments = segments_of(text, cuts)
    token_ids = list(range(len(segments)))
    known = [data.decode(errors="ignore") for data in itertools.accumulate(segments)]
    whole = stream_of(token_ids, stop, OutputKind.CUMULATIVE, Segments(segments))
    ends = [number for number, shown in enumerate(known, 1) if any(item in shown for item in stop)]
    assert len(whole) == min(ends, default=len(segments))
    if ends:
        assert whole[-1].text in [text[: text.find(item)] for item in stop if item in known[len(whole) - 1]]
    else:
        assert whole[-1].text == text


# ------------------------------------------------------------------------------------------------------ linear time


def tokens_decoded(token_ids):
    counting = Counting(tokenizer())
    pieces(token_ids, counting)
    assert counting.num_calls <= 5 * len(token_ids)
    return counting.num_tokens


def test_each_token_is_decoded_a_bounded_number_of_times():
    token_ids = tokenizer()("The capital of France is Paris 😀 你好. " * 60)["input_ids"]
    assert tokens_decoded(token_ids) <= 12 * len(token_ids)


def test_invalid_bytes_are_decoded_a_bounded_number_of_times():
    assert tokens_decoded([bytes_as_tokens("é")[0]] * 1000) <= 30 * 1000


def test_special_tokens_in_a_row_are_decoded_a_bounded_number_of_times():
    """A model that ignores its end of sequence may go on saying it for thousands of tokens."""
    special = tokenizer().convert_tokens_to_ids(SPECIAL_TOKENS[-1])
    assert tokens_decoded([special] * 1000) <= 30 * 1000
