"""The default model on real text, greedy in float32: token for token what `transformers` generates.

Every run of the suite takes a subset of prompts and settings; `pytest -m slow` takes all of them.
"""

import functools
from pydoc_data.topics import topics
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.models.default_model import ensure_default_model
from tests.support.llms import check_engine, generate, greedy
from tests.support.real_texts import CODE, PROSE, SENTENCES, prompts, tokenizer

pytestmark = pytest.mark.usefixtures("small_default_cache")
NUM_NEW_TOKENS = 8
SLOW_TOKENS = 24  # of the whole matrix


@pytest.fixture(scope="module", autouse=True)
def reference_model_is_freed():
    yield
    reference_model.cache_clear()


def load_reference(dtype):
    return AutoModelForCausalLM.from_pretrained(ensure_default_model(), dtype=dtype)


@functools.cache
def reference_model():
    return load_reference(torch.float32)


@functools.cache
def expected(number, num_tokens):
    """What `transformers` generates for prompt `number`, on its own."""
    prompt = torch.tensor([prompts()[number]])
    with torch.no_grad():
        mask = torch.ones_like(prompt)
        output = reference_model().generate(
            prompt, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens, pad_token_id=2
        )
    return output[0, prompt.shape[1] :].tolist()


def check_tokens(numbers, *, num_tokens=NUM_NEW_TOKENS, together=True, warm=False, **options):
    right = {number: expected(number, num_tokens) for number in numbers}
    reference_model.cache_clear()  # 540 MB, before the engine takes as much twice
    params = greedy(num_tokens)
    batches = [numbers] if together else [[number] for number in numbers]
    options = {"dtype": "float32", "max_model_len": 2048} | options
    with LLM(**options) as llm:
        for _ in range(2 if warm else 1):
            for batch in batches:
                outputs = generate(llm, [prompts()[number] for number in batch], params)
                for number, output in zip(batch, outputs, strict=True):
                    assert output.outputs[0].token_ids == right[number], f"prompt {number}, {options}"
        check_engine(llm)
        return llm.stats()


SUBSET = [0, 2, 4, 7, 14, 16, 18, 19, 23, 30, 34]  # of 1 to 300 tokens, around block boundaries
ALL = list(range(len(SENTENCES) + len(PROSE + CODE)))


@pytest.mark.full
def test_mixed_prompts_with_the_defaults_cold_and_with_a_warm_prefix_cache():
    stats = check_tokens(SUBSET, warm=True)
    assert stats.prefix_cache_hits > 0


def test_mixed_prompts_with_nothing_compiled():
    check_tokens(SUBSET[:9:2], enforce_eager=True)


@pytest.mark.full
def test_the_smallest_budget_with_the_smallest_blocks():
    check_tokens(SUBSET[1:8:2], max_num_batched_tokens=24, max_num_seqs=8, block_size=16)


@pytest.mark.full
def test_forced_preemption():
    stats = check_tokens(SUBSET[4:], num_kv_blocks=26, block_size=16, max_model_len=400, max_num_batched_tokens=128)
    assert stats.num_preemptions > 0


@pytest.mark.full
def test_compiled_flex_attention():
    # What FlexAttention takes on a CPU grows with the cache, not with what is in use.
    check_tokens(SUBSET[:9:2], attention_backend="flex", num_kv_blocks=34, max_num_batched_tokens=256)


@functools.cache
def logits_of_transformers(dtype):
    """Those behind the last token of each prompt of the subset, in float32."""
    model = load_reference(dtype)
    with torch.no_grad():
        return [model(torch.tensor([prompts()[number]])).logits[0, -1].float() for number in SUBSET]


def mean_error(own, right):
    """Mean difference of logits besides one that all of them share, which changes no probability."""
    errors = own - right
    return (errors - errors.mean()).abs().mean().item()


@pytest.mark.full
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_bfloat16_logits_are_as_good_as_those_of_transformers(enforce_eager):
    """Greedy streams may part where two tokens nearly tie, so logits are compared: with those of `transformers` in
    bfloat16, and both with its float32.

    bfloat16 keeps 8 bits: logits of about 20 are rounded to 1/8, and 30 layers add their own rounding. Most of that is
    one shift of all logits, 0.1 on average and up to 0.5, by chance: another with each order of additions, as with one
    thread and two in `transformers`. Errors besides it are 0.04, within a tenth for all forms of the kernels.
    """
    references = [logits_of_transformers(dtype) for dtype in (torch.bfloat16, torch.float32)]
    own_errors, their_errors, differences = [], [], []
    with LLM(dtype="bfloat16", max_model_len=2048, enforce_eager=enforce_eager) as llm:
        captured = []
        sample = llm._engine.model_runner.sampler.sample
        llm._engine.model_runner.sampler.sample = lambda logits, *rest: (
            captured.append(logits.clone()) or sample(logits, *rest)
        )
        for number, theirs, exact in zip(SUBSET, *references, strict=True):
            generate(llm, [prompts()[number]], greedy(1))
            own = captured[-1][0].float()
            assert (own - theirs).abs().max() < 1.0, f"prompt {number}"
            differences.append(mean_error(own, theirs))
            own_errors.append(mean_error(own, exact))
            their_errors.append(mean_error(theirs, exact))
    assert max(differences) < 0.1 and mean(differences) < 0.07
    assert mean(own_errors) < 1.15 * mean(their_errors)


# Of Python's reference, which each interpreter carries.
TOPICS = ["assert", "context-managers", "execmodel", "floating", "formatstrings", "import", "lambda", "typesseq"]


def log_likelihoods_by_transformers(texts):
    """That of each token but the first of each text, in float32."""
    for text in texts:
        with torch.no_grad():
            logprobs = reference_model()(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
        yield logprobs.gather(-1, torch.tensor(text[1:])[:, None])[:, 0]


@pytest.mark.full
@pytest.mark.parametrize("quantization, nats", [(None, 0.01), ("int8", 0.02)], ids=["bfloat16", "int8"])
def test_real_text_is_as_likely_as_by_transformers_in_float32(quantization, nats):
    """Quality on text that nobody tuned: 0.01 nats a token are 1 % of perplexity."""
    texts = [tokenizer()(topics[topic])["input_ids"][:400] for topic in TOPICS]
    expected_means = [likelihoods.mean().item() for likelihoods in log_likelihoods_by_transformers(texts)]
    reference_model.cache_clear()
    with LLM(max_model_len=2048, quantization=quantization) as llm:
        outputs = generate(llm, texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    means = [
        mean(report[token_id].logprob for report, token_id in zip(output.prompt_logprobs[1:], text[1:], strict=True))
        for output, text in zip(outputs, texts, strict=True)
    ]
    assert mean(means) == pytest.approx(mean(expected_means), abs=nats)
    assert means == pytest.approx(expected_means, abs=3 * nats)
    assert mean(expected_means) > -4  # a model of English, not of noise


SETTINGS = {
    "budget 40": {"max_num_batched_tokens": 40, "max_num_seqs": 24, "block_size": 16},
    "budget 128": {"max_num_batched_tokens": 128},
    "budget 512": {"max_num_batched_tokens": 512},
    "budget 4096": {"max_num_batched_tokens": 4096},
    "block size 16": {"block_size": 16},
    "block size 32": {"block_size": 32},
    "block size 64": {"block_size": 64},
    "no prefix cache": {"enable_prefix_caching": False},
    "warm prefix cache": {"warm": True},
    "preemption": {"num_kv_blocks": 110, "block_size": 16, "max_model_len": 1700},
    "one at a time": {"together": False},
    "eager": {"enforce_eager": True},
    "eager, blocks of 16": {"enforce_eager": True, "block_size": 16},
    "sdpa, compiled": {"attention_backend": "sdpa"},
    "flex": {"attention_backend": "flex", "num_kv_blocks": 400},
    "flex, blocks of 16": {"attention_backend": "flex", "num_kv_blocks": 700, "block_size": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_every_prompt_under_every_setting(setting):
    stats = check_tokens(ALL, num_tokens=SLOW_TOKENS, **setting)
    if "num_kv_blocks" in setting and setting["num_kv_blocks"] == 110:
        assert stats.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("order", ["reversed", "longest first", "interleaved"])
def test_every_prompt_in_every_order_of_submission(order):
    orders = {
        "reversed": ALL[::-1],
        "longest first": sorted(ALL, key=lambda number: -len(prompts()[number])),
        "interleaved": ALL[::2] + ALL[1::2],
    }
    check_tokens(orders[order], num_tokens=SLOW_TOKENS)
