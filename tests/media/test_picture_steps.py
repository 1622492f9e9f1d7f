"""Prompts with pictures in the engine: the tokens of the model's own `generate`, however their rows are computed."""

import pytest

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.features.prompt_hashes import PromptHashes
from tests.support.llms import check_engine, generate, token_ids
from tests.support.picture_models import expected, mixed_parts, picture_model, picture_prompt, pictures_of

FAMILIES = ["llava", "qwen3_vl"]  # rows of one position each; M-RoPE, and features that later layers add
OPTIONS = {"block_size": 16, "max_num_seqs": 4, "max_model_len": 200}
POOLS = {
    "whole": {"num_kv_blocks": 64, "max_num_batched_tokens": 512},
    "cut within pictures": {"num_kv_blocks": 64, "max_num_batched_tokens": 20},
    "scarce": {"num_kv_blocks": 14, "max_num_batched_tokens": 20},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def open_llm(family, **options):
    return LLM(picture_model(family), **(OPTIONS | POOLS["whole"] | options))


def answers(llm, family, params=GREEDY):
    return token_ids(generate(llm, [picture_prompt(family, *parts) for parts in mixed_parts(family)], params))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_cold_and_warm(family, overlap, pool):
    own = [expected(family, *parts) for parts in mixed_parts(family)]
    with open_llm(family, overlap=overlap, **POOLS[pool]) as llm:
        assert answers(llm, family) == own
        before = llm.stats().prefix_cache_hits
        assert answers(llm, family) == own
        assert llm.stats().prefix_cache_hits > before
        check_engine(llm)


def test_another_picture_under_the_same_ids_is_not_found():
    first, _, third = pictures_of("llava", 3)
    with open_llm("llava") as llm:
        for picture in (first, third):
            generate(llm, [picture_prompt("llava", [5] * 20, picture, [6])])
        assert llm.stats().prefix_cache_hits == 16  # the block of text before
        generate(llm, [picture_prompt("llava", [5] * 20, dict(first), [6, 7])])
        assert llm.stats().prefix_cache_hits == 16 + 32


def test_a_router_hashes_blocks_as_the_books_do():
    first, _, third = pictures_of("llava", 3)
    prompts = [picture_prompt("llava", [5] * 20, picture, [6] * 16) for picture in (first, third, first)]
    with open_llm("llava") as llm:
        books = llm._engine.block_manager
        one, other, again = (list(PromptHashes(prompt, 16, hash_seed=books.hash_seed)) for prompt in prompts)
        generate(llm, prompts[:1])
        assert set(one) <= {block.block_hash for block in books.entry_of if block is not None}
    assert one == again and one[0] == other[0] and not set(one[1:]) & set(other[1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_beams_forks_and_resumed_outputs_keep_their_pictures(family):
    parts = mixed_parts(family)[2]
    own = expected(family, *parts, max_tokens=14)
    with open_llm(family) as llm:
        (output,) = generate(llm, [picture_prompt(family, *parts)], GREEDY)
        assert token_ids([output]) == [own[:8]]
        params = SamplingParams(n=3, temperature=0.01, top_k=1, max_tokens=8, ignore_eos=True)
        (several,) = generate(llm, [picture_prompt(family, *parts)], params)
        assert [sample.token_ids for sample in several.outputs] == [own[:8]] * 3
        *_, forked = llm.fork(output, len(output.prompt_token_ids) + 4, GREEDY)
        assert token_ids([forked]) == [own[4:12]]
        *_, resumed = llm.resume(output, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        assert token_ids([resumed]) == [own]
        with pytest.raises(ValueError, match="position 5 is within a picture"):
            llm.fork(output, 5, GREEDY)
        (beams,) = llm.beam_search([picture_prompt(family, *parts)], BeamSearchParams(beam_width=3, max_tokens=6))
        assert len(beams.sequences) == 3


def test_placeholders_that_are_text_keep_their_embedding():
    (picture,) = pictures_of("llava", 1)
    text = [5, 264, 264, 6, 7]
    own = expected("llava", text)
    with open_llm("llava", max_num_batched_tokens=64) as llm:
        both = [picture_prompt("llava", [5], picture, [6]), picture_prompt("llava", text)]
        assert token_ids(generate(llm, both, GREEDY)) == [expected("llava", [5], picture, [6]), own]
