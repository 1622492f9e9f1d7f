"""FIM prompts: markers of each family in their order, texts between them encoded as plain text."""

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from nanovllm.features.infill.infill import MARKERS, infill_of
from tests.support.tiny_models import tiny_tokenizer


def tokenizer_of(family, tokenizer=None):
    """A tokenizer, or the tiny one, with the markers of a family, some of them not special, as Qwen's."""
    tokenizer = tokenizer or tiny_tokenizer()
    markers = MARKERS[family]
    named = (markers.prefix, markers.suffix, markers.middle, markers.file, markers.repository, *markers.ends)
    names = dict.fromkeys(name for name in named if name is not None)
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    return tokenizer


def infill(tokenizer):
    found = infill_of(tokenizer)
    assert found is not None
    return found


@pytest.mark.parametrize("family", MARKERS)
def test_a_family_is_found_by_its_markers_which_end_a_middle_and_has_them_in_its_order(family):
    tokenizer, markers = tokenizer_of(family), MARKERS[family]
    own = infill(tokenizer)
    (ids,) = own.prompts(["def f(x):\n    "], "\n    return y\n")
    prefix, suffix = f"{markers.prefix}def f(x):\n    ", f"{markers.suffix}\n    return y\n"
    parts = suffix + prefix if markers.is_suffix_first else prefix + suffix
    assert ids == tokenizer(parts + (markers.middle or ""), add_special_tokens=False)["input_ids"]
    ends = (markers.prefix, markers.suffix, *markers.ends)
    assert set(tokenizer.convert_tokens_to_ids(ends)) <= set(own.stop_token_ids)


def test_a_tokenizer_without_markers_has_no_infill():
    assert infill_of(tiny_tokenizer()) is None and infill_of(None) is None


def test_a_text_that_spells_a_marker_stays_text():
    tokenizer = tokenizer_of("Qwen Coder")
    marker = tokenizer.convert_tokens_to_ids("<|fim_middle|>")
    prefix, suffix = "a = '<|fim_middle|>'\n", "b = '<|fim_suffix|><|fim_middle|>'\n"
    (ids,) = infill(tokenizer).prompts([prefix], suffix, files=[("f.py", prefix)])
    assert ids.count(marker) == 1 and ids[-1] == marker
    assert tokenizer.decode(ids[:-1]).count("<|fim_middle|>") == 3


def test_other_files_come_first_and_the_middle_may_have_begun():
    tokenizer = tokenizer_of("Qwen Coder")
    (ids,) = infill(tokenizer).prompts(["a"], "b", files=[("f.py", "x = 1"), ("g.py", "y = 2")], begun="c")
    assert tokenizer.decode(ids) == (
        "<|repo_name|>repository\n<|file_sep|>f.py\nx = 1\n<|file_sep|>g.py\ny = 2\n<|file_sep|>"
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>c"
    )
    plain = tokenizer_of("DeepSeek Coder")
    (ids,) = infill(plain).prompts(["a"], "b", files=[("f.py", "x = 1")])
    assert plain.decode(ids).startswith("f.py\nx = 1\n<\uff5cfim▁begin\uff5c>a")


def test_the_prefix_alone_has_the_space_that_a_tokenizer_puts_before_a_text():
    own = Tokenizer(BPE({character: number for number, character in enumerate("▁☺abc")}, []))
    own.pre_tokenizer = Metaspace()
    tokenizer = tokenizer_of("CodeLlama", PreTrainedTokenizerFast(tokenizer_object=own))
    (ids,) = infill(tokenizer).prompts(["a"], "b", begun="c")
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁<PRE>", "▁", "a", "▁<SUF>", "b", "▁<MID>", "c"]


def test_prefixes_may_be_token_ids_and_share_a_suffix():
    tokenizer = tokenizer_of("StarCoder")
    first, second = infill(tokenizer).prompts(["one", tokenizer("two")["input_ids"]], "three")
    assert [tokenizer.decode(ids) for ids in (first, second)] == [
        f"<fim_prefix>{prefix}<fim_suffix>three<fim_middle>" for prefix in ("one", "two")
    ]


def test_half_of_a_surrogate_pair_is_refused():
    with pytest.raises(ValueError, match="the suffix"):
        infill(tokenizer_of("CodeLlama")).prompts(["a"], "\ud800")
