"""Models whose layers form cache groups: greedy tokens are those of `transformers`, with windows in small pools."""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.attention import AttentionStep
from nanovllm.errors import StepError
from nanovllm.features.groups.cache_groups import CacheGroups
from nanovllm.serving.replicas.pool_stats import PoolStats
from tests.support.layer_kinds import WINDOW, expected, model, prompts
from tests.support.llms import check_engine, fail_in_step, greedy
from tests.support.logprobs import assert_right
from tests.support.tiny_models import tiny_tokenizer

NUM_NEW_TOKENS = 30
GREEDY = greedy(NUM_NEW_TOKENS)
FAMILIES = ("Mistral", "Gemma2", "Gemma3Text", "Cohere2", "GptOss", "Llama4Text")
OPTIONS = {"block_size": 16, "num_kv_blocks": 80, "max_model_len": 160, "max_num_seqs": 6}
SCARCE = OPTIONS | {"max_num_batched_tokens": 40, "num_kv_blocks": 12}
SETTINGS = {
    "roomy": OPTIONS,
    "scarce": SCARCE,
    "small budget": OPTIONS | {"max_num_batched_tokens": 22},
    "no prefix cache": SCARCE | {"enable_prefix_caching": False, "overlap": True},
    "small window pool": OPTIONS | {"window_pool_share": 0.05, "overlap": True},
}


def open_llm(family, **options):
    if family == "Mistral":  # its window is its one group
        options.pop("window_pool_share", None)
        options |= {"num_kv_blocks": 6} if options.get("num_kv_blocks", 0) < 80 else {}
    llm = LLM(model(family), enforce_eager=True, **options)
    assert isinstance(llm._engine.block_manager, CacheGroups)
    return llm


def generate(llm, params=GREEDY):
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    check_engine(llm)
    return outputs


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def check(family, options):
    with open_llm(family, **options) as llm:
        for _ in range(2):
            assert token_ids(generate(llm)) == expected(family, NUM_NEW_TOKENS)
        stats = llm.stats()
        if "window_pool_share" not in options:  # in the smallest window pool no tail outlives the next request
            assert (stats.prefix_cache_hits > 0) == options.get("enable_prefix_caching", True)
        assert stats.num_preemptions > 0 or options.get("num_kv_blocks", 80) >= 80


@pytest.mark.costly
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_in_scarce_pools_with_overlap(family):
    check(family, SCARCE | {"overlap": True})


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_in_every_setting(family, setting):
    check(family, setting)


@pytest.mark.costly
@pytest.mark.parametrize("family", ["Gemma3Text", "Llama4Text"])
def test_the_kernels_of_a_cpu_answer_alike(family):
    with LLM(model(family), attention_backend="cpp", **SCARCE) as llm:
        assert isinstance(llm._engine.block_manager, CacheGroups)
        assert token_ids(generate(llm)) == expected(family, NUM_NEW_TOKENS)


@pytest.fixture(scope="module")
def scarce():
    with open_llm("Gemma3Text", **SCARCE, overlap=True) as llm:
        yield llm


@pytest.mark.full
def test_samples_and_penalties_are_those_of_an_engine_without_a_prefix_cache(scarce):
    params = SamplingParams(n=3, seed=5, max_tokens=20, repetition_penalty=1.2, top_p=0.9)
    with open_llm("Gemma3Text", **OPTIONS, enable_prefix_caching=False) as llm:
        alone = [completion.token_ids for output in generate(llm, params) for completion in output.outputs]
    assert [completion.token_ids for output in generate(scarce, params) for completion in output.outputs] == alone


def test_log_probabilities_of_prompts_and_outputs_are_those_of_the_model(scarce):
    params = greedy(8, logprobs=2, prompt_logprobs=2)
    for output in generate(scarce, params):
        assert_right(model("Gemma3Text"), output, params)


def test_aborted_streams_and_emptied_caches_change_no_other_token(scarce):
    aborted, rest = prompts()[3], prompts()
    streams = scarce.stream(aborted, GREEDY)
    for _ in range(5):
        next(streams)
    streams.close()
    scarce.reset_prefix_cache()
    outputs = list(scarce.stream(rest[0], GREEDY))
    assert outputs[-1].finished
    assert token_ids(generate(scarce)) == expected("Gemma3Text", NUM_NEW_TOKENS)


@pytest.mark.costly
@pytest.mark.parametrize("number", [2, 5, 11])
def test_a_failed_step_under_overlap_changes_no_token(monkeypatch, number):
    with open_llm("Gemma3Text", **SCARCE, overlap=True) as llm:
        with monkeypatch.context() as patch:
            fail_in_step(patch, llm, number, RuntimeError("once"))
            with pytest.raises((StepError, RuntimeError)):
                generate(llm)
        assert token_ids(generate(llm)) == expected("Gemma3Text", NUM_NEW_TOKENS)


def test_statistics_name_each_group(scarce):
    full, window = scarce.stats().cache_groups
    assert (full.window, full.num_blocks) == (None, SCARCE["num_kv_blocks"] - 1)
    assert (window.window, window.num_used_blocks) == (WINDOW, 0)
    assert window.num_blocks < full.num_blocks


def test_statistics_of_replicas_are_added_up(scarce):
    stats = scarce.stats()
    both = PoolStats().total([stats, stats], num_running=0, num_waiting=0, hook_error=None)
    assert [group.num_blocks for group in both.cache_groups] == [2 * group.num_blocks for group in stats.cache_groups]
    assert both.cache_groups[1].window == WINDOW


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text", "Cohere2"])
def test_two_ranks_have_the_groups_of_one(family, tmp_path):
    model(family).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    options = {"attention_backend": "sdpa", "enforce_eager": True, "tensor_parallel_size": 2}
    with LLM(tmp_path, **(SCARCE | options)) as llm:
        assert isinstance(llm._engine.block_manager, CacheGroups)
        for _ in range(2):
            assert token_ids(generate(llm)) == expected(family, NUM_NEW_TOKENS)


def test_a_share_for_windows_is_refused_where_layers_are_alike():
    with pytest.raises(ValueError, match="all layers of this model share one pool"):
        open_llm("Olmo3", **(OPTIONS | {"max_model_len": WINDOW, "window_pool_share": 0.5}))


def test_slot_mappings_of_several_groups_are_dynamic_in_their_rows():
    """For compiled layers of a model that does not pass its keyword arguments on to attention."""
    with open_llm("Gemma3Text", **OPTIONS) as llm:
        binding = llm._engine.model_runner.binding
        binding.passes_keywords = False
        binding.calls = dict.fromkeys(binding.layer_modules, print)  # not called
        slot_mapping = torch.zeros(2, 5, dtype=torch.int64)
        with binding._in_step(AttentionStep(None, 5), slot_mapping):
            assert slot_mapping._dynamo_weak_dynamic_indices == {1}
        binding.calls = {}
