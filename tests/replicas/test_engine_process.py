"""`--engine-process`: an engine in another process answers as one in the server's, and is started again if it dies."""

import asyncio
import os
import signal

import pytest
import torch

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.serving.server import app
from nanovllm.serving.server.engine_process import EngineProcessLLM, front_door
from nanovllm.serving.server.settings import ServerSettings
from tests.support.llms import comes_true, generate
from tests.support.replicas import OPTIONS, one_engine, tiny_folder
from tests.support.serving import served, serving
from tests.support.tiny_models import random_prompts, tiny_model, tiny_tokenizer

PARAMS = SamplingParams(seed=5, temperature=0.9, max_tokens=150, ignore_eos=True)
BODY = {"model": "tiny", "seed": 5, "temperature": 0.9, "max_tokens": 150, "extra_body": {"ignore_eos": True}}


running = served(lambda: serving(model=tiny_folder(), front_door=EngineProcessLLM, **OPTIONS))


def expected(prompt):
    return generate(one_engine(), prompt, PARAMS)[0].outputs[0].text


def streamed(running, prompt):
    for chunk in running.client().completions.create(prompt=prompt, stream=True, **BODY):
        yield chunk.choices[0].text


def test_answers_and_streams_are_those_of_an_engine_in_the_servers_process(running):
    (replica,) = running.engine.replicas()
    assert replica.process_id not in (None, os.getpid())
    prompts = random_prompts(4, seed=41)
    answer = running.client().completions.create(prompt=prompts, **BODY)
    assert [choice.text for choice in answer.choices] == [expected(prompt) for prompt in prompts]
    assert "".join(streamed(running, prompts[0])) == expected(prompts[0])
    for _ in range(2):
        answer = running.answer("/v1/completions", {"prompt": prompts[0] * 4, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.full
def test_a_stream_goes_on_when_its_engine_is_killed_and_health_says_so_meanwhile(running):
    prompt = random_prompts(1, low=30, high=30, seed=42)[0]
    texts = []
    for text in streamed(running, prompt):
        texts.append(text)
        if len(texts) == 20:
            (dead,) = running.engine.replicas()
            os.kill(dead.process_id, signal.SIGKILL)
            comes_true(lambda: running.get("/health").status_code == 503)
    assert "".join(texts) == expected(prompt)
    comes_true(lambda: running.get("/health").status_code == 200)
    (now,) = running.get("/health").json()["replicas"]
    assert (now["state"], now["restarts"]) == ("up", 1)


@pytest.mark.full
def test_prefixes_go_to_files_when_the_server_ends(tmp_path):
    options = OPTIONS | {"prefix_cache_dir": str(tmp_path), "enable_prefix_caching": True}
    prompt = random_prompts(1, low=90, high=90, seed=43)[0]
    cached = []
    for _ in range(2):
        with serving(model=tiny_folder(), front_door=EngineProcessLLM, **options) as running:
            answer = running.client().completions.create(model="tiny", prompt=prompt, max_tokens=1)
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0 < cached[1]


@pytest.mark.parametrize("given", [None, False, True])
def test_the_option_chooses_the_front_door(monkeypatch, given):
    opened = []

    def open_front(self, *_, **__):
        opened.append(type(self))
        raise KeyboardInterrupt

    monkeypatch.setattr(AsyncLLM, "__init__", open_front)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        app.serve("folder", None, ServerSettings(engine_process=given), {}, ())
    assert opened == [EngineProcessLLM if given else AsyncLLM]


@pytest.mark.full
def test_a_gpu_by_its_number_is_refused_with_the_remedy():
    assert front_door({"device": "cuda:1"}, engine_process=False) is AsyncLLM
    with pytest.raises(ValueError, match=r"'cuda:1', which --engine-process does not support.*CUDA_VISIBLE_DEVICES=1"):
        front_door({"device": "cuda:1"}, engine_process=True)


@pytest.mark.full
def test_one_gpu_has_it_by_default_unless_it_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    doors = [front_door({"device": device}, engine_process=None) for device in ("auto", "cuda", "cuda:1", "cpu")]
    assert doors == [EngineProcessLLM, EngineProcessLLM, AsyncLLM, AsyncLLM]
    assert front_door({"tensor_parallel_size": 2}, engine_process=None) is AsyncLLM
    assert front_door({}, engine_process=False) is AsyncLLM


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_async_llm_has_its_engine_in_a_process_if_asked(ranks):
    prompts = random_prompts(3, seed=44)
    async with AsyncLLM(tiny_folder(), engine_process=True, tensor_parallel_size=ranks, **OPTIONS) as llm:
        (replica,) = llm.replicas()
        assert replica.process_id not in (None, os.getpid())

        async def text_of(prompt):
            return "".join([o.outputs[0].text async for o in llm.generate(prompt, PARAMS, output_kind="delta")])

        texts = await asyncio.gather(*map(text_of, prompts))
    assert texts == [expected(prompt) for prompt in prompts]


@pytest.mark.full
def test_a_loaded_module_stays_in_its_process():
    with pytest.raises(ValueError, match="a loaded module as model"):
        AsyncLLM(tiny_model(), tokenizer=tiny_tokenizer(), engine_process=True)
