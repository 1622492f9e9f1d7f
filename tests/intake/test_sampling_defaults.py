"""Sampling defaults of a model's generation config: used by requests that leave fields out, and by no others."""

import json
from dataclasses import replace

import pytest

from nanovllm import LLM, AsyncLLM, EngineConfig, ModelLoadError, SamplingParams
from tests.support.llms import generate, token_ids
from tests.support.serving import serving, user
from tests.support.tiny_models import save_tiny, tiny_model

OPTIONS = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 65, "max_model_len": 64}
OWN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
OTHERS = {"do_sample": True, "max_new_tokens": 3, "typical_p": 0.5, "eos_token_id": 7}
PROMPT = [5] * 50


def folder_with(folder, **generation_config):
    save_tiny(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_with(tmp_path_factory.mktemp("models") / "own", **OWN, **OTHERS)


def test_requests_without_parameters_are_sampled_as_the_model_says(folder):
    with LLM(folder, **OPTIONS) as llm, LLM(folder, generation_config="none", **OPTIONS) as plain:
        assert llm.default_sampling_params == SamplingParams(**OWN)
        assert plain.default_sampling_params == SamplingParams()
        # A request's noise follows from its number: the first of one engine is compared with the first of the other.
        for params, is_same in ((None, False), (SamplingParams(**OWN), True), (SamplingParams(seed=3), True)):
            own, other = (token_ids(generate(each, PROMPT, params)) for each in (llm, plain))
            assert (own == other) is is_same


def test_the_first_requests_of_two_engines_agree(folder):
    """Without parameters, and with the model's own written out."""
    answers = []
    for params in (None, SamplingParams(**OWN)):
        with LLM(folder, **OPTIONS) as llm:
            answers += token_ids(generate(llm, PROMPT, params))
    assert answers[0] == answers[1]
    assert len(answers[0]) > 3  # max_new_tokens is none of them


async def test_the_asynchronous_engine_has_the_same(folder):
    async with AsyncLLM(folder, **OPTIONS) as llm:
        assert llm.default_sampling_params == SamplingParams(**OWN)
        seeded = replace(llm.default_sampling_params, seed=4)
        assert [out async for out in llm.generate(PROMPT, seeded, output_kind="final")]


@pytest.mark.parametrize(
    "path, own",
    [
        ("/v1/completions", {"prompt": "one two"}),
        ("/v1/chat/completions", {"messages": [user("one two")]}),
    ],
)
def test_a_served_request_takes_the_fields_that_it_leaves_out_from_the_model(path, own):
    model = tiny_model()
    for name, value in OWN.items():
        setattr(model.generation_config, name, value)
    none = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    with serving(model=model) as running:

        def text(**fields):
            (choice,) = running.answer(path, own, {"max_tokens": 12, "seed": 6}, fields)["choices"]
            return choice["text"] if "text" in choice else choice["message"]["content"]

        assert text() == text(**OWN) != text(**none)
        assert text(temperature=0.9) == text(**OWN | {"temperature": 0.9})


def test_do_sample_alone_is_a_temperature_of_one(tmp_path):
    """The engine draws the same either way; the commands are greedy where a model sets nothing."""
    for index, (given, expected) in enumerate((
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 1.0}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": 4}, {"temperature": 1.0, "top_k": 4}),
        ({"do_sample": True, "temperature": 0.4}, {"temperature": 0.4}),
        ({"do_sample": False}, {}),
    )):  # fmt: skip
        with LLM(folder_with(tmp_path / str(index), **given), **OPTIONS) as llm:
            assert llm.sampling_defaults == expected
            assert llm.default_sampling_params == SamplingParams(**expected)


def test_values_out_of_range_are_refused_with_a_way_around_them(tmp_path):
    folder = folder_with(tmp_path / "bad", top_p=1.7)
    with pytest.raises(ModelLoadError, match=r"top_p is 1\.7.*generation_config='none'"):
        LLM(folder, **OPTIONS)
    with LLM(folder, generation_config="none", **OPTIONS) as llm:
        assert llm.default_sampling_params == SamplingParams()


def test_the_option_is_one_of_two():
    with pytest.raises(ValueError, match="generation_config is 'vllm'; it must be one of auto, none"):
        EngineConfig(generation_config="vllm")
