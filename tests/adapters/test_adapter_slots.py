"""Slots of adapters: requests wait for one, and loads, unloads and aborts in any order leave no stale KV."""

import random
import time

import numpy as np
import pytest

from nanovllm import LLM
from nanovllm.features.adapters import slots
from nanovllm.features.adapters.steps import runs_of
from tests.support.adapter_files import merged, save_adapter
from tests.support.layer_kinds import own_answer
from tests.support.llms import assert_idle_and_whole, generate, greedy, submit, token_ids
from tests.support.tiny_models import random_prompts, tiny_model

NUM_ADAPTERS = 5
SIZES = {"num_kv_blocks": 33, "max_num_seqs": 6, "max_model_len": 128, "max_num_batched_tokens": 48}
(SHARED,) = random_prompts(1, low=40, high=40, seed=4)
PROMPTS = [SHARED + end for end in random_prompts(3, low=1, high=30, seed=5)] + [SHARED[:17]]
NUM_TOKENS = 6
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1)


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [save_adapter(folder / str(seed), model, seed=seed, rank=2 + seed) for seed in range(NUM_ADAPTERS)]


@pytest.fixture(scope="module")
def answers(model, folders):
    """The tokens of each prompt by the folder of its adapter; "" is none."""
    models = {"": model} | {folder: merged(model, folder) for folder in folders}
    return {
        (number, folder): own_answer(module, prompt, NUM_TOKENS)
        for folder, module in models.items()
        for number, prompt in enumerate(PROMPTS)
    }


def names_in_steps(llm):
    """The adapters' names in each step from now on, in a list that grows."""
    seen = []
    runner = llm._engine.model_runner
    launch = runner.launch

    def noting(batch):
        salts = (entry.sequence.cache_salt for entry in batch.entries)
        seen.append({salt.adapter.name for salt in salts if salt})
        return launch(batch)

    runner.launch = noting
    return seen


def test_the_first_tokens_tell_adapters_apart(answers):
    for number in range(len(PROMPTS)):
        firsts = [tokens[0] for (of, _), tokens in answers.items() if of == number]
        assert len(set(firsts)) >= NUM_ADAPTERS  # two of them may begin alike


@pytest.mark.parametrize("max_loras", [1, 2, 3])
def test_a_step_has_at_most_max_loras_adapters_and_all_requests_end(max_loras, model, folders, answers):
    with LLM(model, max_loras=max_loras, **SIZES | {"max_num_batched_tokens": 512}) as llm:
        for number, folder in enumerate(folders):
            llm.load_adapter(str(number), folder)
        seen = names_in_steps(llm)
        each = [(prompt, adapter) for prompt in range(len(PROMPTS)) for adapter in range(NUM_ADAPTERS)]
        outputs = generate(llm, [PROMPTS[p] for p, _ in each], GREEDY, adapter=[str(a) for _, a in each])
        assert token_ids(outputs) == [answers[p, folders[a]] for p, a in each]
        assert max(map(len, seen)) == max_loras
        assert_idle_and_whole(llm)


def test_requests_without_an_adapter_pass_ones_that_wait_for_a_slot(model, folders):
    with LLM(model, max_loras=1, **SIZES) as llm:
        for number in range(2):
            llm.load_adapter(str(number), folders[number])
        engine = llm._engine
        first = llm.stream(PROMPTS[0], greedy(40, ignore_eos=True), adapter="0")
        next(first)
        waiting = llm.stream(PROMPTS[1], GREEDY, adapter="1")
        assert len(generate(llm, [PROMPTS[2]], GREEDY)[0].outputs[0].token_ids) == NUM_TOKENS
        assert len(engine.scheduler.running) == 1
        *_, last = waiting
        assert last.finished and len(list(first)) > 0


def test_an_adapter_that_waits_gets_a_slot_though_others_keep_coming(model, folders, monkeypatch):
    monkeypatch.setattr(slots, "MAX_REFUSALS", 5)
    with LLM(model, max_loras=1, **SIZES) as llm:
        for number in range(2):
            llm.load_adapter(str(number), folders[number])
        engine = llm._engine
        salts = {name: llm._salted(name, "") for name in "01"}
        for number in range(2):
            submit(engine, f"flood {number}", PROMPTS[number], greedy(20, ignore_eos=True), cache_salt=salts["0"])
        engine.step()
        submit(engine, "waiting", PROMPTS[2], GREEDY, cache_salt=salts["1"])
        for number in range(2, 60):
            submit(engine, f"flood {number}", PROMPTS[0], greedy(20, ignore_eos=True), cache_salt=salts["0"])
            for _ in range(3):
                engine.step()
            if "waiting" not in engine.requests:
                break
        assert "waiting" not in engine.requests and number < 40


@pytest.mark.parametrize("ends", ["abort", "timeout"])
def test_a_request_that_ends_while_it_waits_for_a_slot_leaves_no_slot_empty(ends, model, folders, monkeypatch):
    monkeypatch.setattr(slots, "MAX_REFUSALS", 5)
    with LLM(model, max_loras=1, **SIZES) as llm:
        for number in range(2):
            llm.load_adapter(str(number), folders[number])
        engine = llm._engine
        salts = {name: llm._salted(name, "") for name in "01"}
        submit(engine, "running", PROMPTS[0], greedy(50, ignore_eos=True), cache_salt=salts["0"])
        timeout = 0.2 if ends == "timeout" else None
        submit(engine, "waiting", PROMPTS[2], GREEDY, cache_salt=salts["1"], timeout=timeout)
        for _ in range(10):
            engine.step()
        submit(engine, "next", PROMPTS[1], GREEDY, cache_salt=salts["0"])
        if ends == "abort":
            engine.abort("waiting")
        else:
            time.sleep(0.3)
        for _ in range(15):
            engine.step()
        assert list(engine.requests) == ["running"]


def test_a_free_slot_is_taken_though_an_adapter_beyond_the_look_ahead_waits(model, folders, monkeypatch):
    """Requests of a higher priority hide it from admission: none of them may wait for it."""
    monkeypatch.setattr(slots, "MAX_REFUSALS", 5)
    with LLM(model, max_loras=1, **SIZES) as llm:
        for number in range(2):
            llm.load_adapter(str(number), folders[number])
        engine = llm._engine
        salts = {name: llm._salted(name, "") for name in "01"}
        submit(engine, "running", PROMPTS[0], greedy(20, ignore_eos=True), cache_salt=salts["0"])
        submit(engine, "waiting", PROMPTS[2], GREEDY, cache_salt=salts["1"])
        for _ in range(10):
            engine.step()
        for number in range(80):
            submit(engine, str(number), PROMPTS[3], greedy(2, ignore_eos=True), cache_salt=salts["0"], priority=-1)
        for _ in range(400):
            engine.step()
        assert not engine.requests


def test_runs_are_of_neighbouring_rows_with_one_adapter():
    assert runs_of(np.array([-1, 2, 2, 0, -1, 0, 0], np.int32)) == [(1, 3, 2), (3, 4, 0), (5, 7, 0)]
    assert runs_of(np.array([-1], np.int32)) == []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("form", ["live", "drafts"])
def test_loads_unloads_aborts_and_steps_in_any_order_give_each_request_its_own_adapter(
    form, seed, model, folders, answers
):
    """Every adapter gives another first token, so that a stale block or a wrong slot shows at once."""
    rng = random.Random(f"{form} {seed}")
    options = {"speculation": "suffix"} if form == "drafts" else {}
    with LLM(model, max_loras=2, **SIZES | options) as llm:
        engine = llm._engine
        expected = {}
        named = {}

        def add():
            name = rng.choice(["", *named])
            prompt = rng.randrange(len(PROMPTS))
            request_id = f"{len(expected)}"
            salt = llm._salted(name or None, rng.choice(("", "", "salt")))
            submit(engine, request_id, PROMPTS[prompt], GREEDY, cache_salt=salt, priority=rng.choice((0, 0, 1)))
            expected[request_id] = answers[prompt, named.get(name, "")]

        def load():
            name = rng.choice("xyz")
            named[name] = rng.choice(folders)
            llm.load_adapter(name, named[name])

        def unload():
            if named:
                name = rng.choice(list(named))
                del named[name]
                llm.unload_adapter(name)

        def abort():
            if engine.requests:
                engine.abort(rng.choice(list(engine.requests)))

        def check():
            while engine.outputs:
                output = engine.outputs.popleft()
                assert output.finished and output.error is None
                assert output.outputs[0].token_ids == expected[output.request_id]

        def step():
            engine.step()
            check()

        acts = [add] * 4 + [load] + [unload] + [abort] + [step] * 9 + [engine.reset_prefix_cache] * (seed % 2)
        for _ in range(400):
            rng.choice(acts)()
        while engine.has_unfinished:
            step()
        assert_idle_and_whole(llm)
