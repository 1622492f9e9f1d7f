"""The model type of lm-eval: scores of every kind of task equal those of lm-eval's own `hf` type."""

import functools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from nanovllm.tools.evaluation import lm_eval_model
from tests.support.evaluation_tasks import TASKS, write_tasks
from tests.support.tiny_models import save_tiny, tiny_tokenizer

NUM_QUESTIONS = 5
ARGUMENTS = {"dtype": "float32", "max_length": 1500}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a token for the end of text."""
    folder = save_tiny(tmp_path_factory.mktemp("model"), eos_token_ids=[3], with_tokenizer=False)
    tiny_tokenizer(eos_token="<|end|>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"), NUM_QUESTIONS)


@functools.cache
def open_model(kind, folder, max_length=ARGUMENTS["max_length"]):
    lm_eval_model.register()
    own = {"device": "cpu"} if kind == "hf" else {"num_kv_blocks": 400}
    return get_model(kind)(pretrained=str(folder), dtype="float32", max_length=max_length, **own)


def evaluate(model, tasks, task):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=0, log_samples=True)


def figures(results, task):
    return {
        name: float(value)
        for name, value in results["results"][task].items()
        if name.endswith(",none") and "stderr" not in name
    }


def flat(responses):
    """The numbers and texts within nested answers."""
    if isinstance(responses, (list, tuple)):
        return [leaf for item in responses for leaf in flat(item)]
    return [responses]


@pytest.mark.parametrize("max_length", [1500, 300], ids=["whole contexts", "contexts cut at their beginning"])
@pytest.mark.parametrize("task", TASKS)
def test_scores_are_those_of_the_hf_type(folder, tasks, task, max_length):
    ours, theirs = (evaluate(open_model(kind, folder, max_length), tasks, task) for kind in ("nanovllm", "hf"))
    assert figures(ours, task) == pytest.approx(figures(theirs, task), rel=1e-4)
    responses = [[flat(sample["resps"]) for sample in run["samples"][task]] for run in (ours, theirs)]
    assert len(responses[0]) == NUM_QUESTIONS
    for own, expected in zip(*responses, strict=True):
        for one, other in zip(own, expected, strict=True):
            assert one == (pytest.approx(other, abs=5e-3) if isinstance(other, float) else other)


def test_a_shared_few_shot_prompt_is_computed_once(folder, tasks):
    model = open_model("nanovllm", folder)
    model.llm.reset_prefix_cache()
    before = model.llm.stats()
    evaluate(model, tasks, "store_choice")
    after = model.llm.stats()
    num_requests = 4 * NUM_QUESTIONS
    computed = after.num_scheduled_tokens - before.num_scheduled_tokens
    looked_up = after.prefix_cache_queries - before.prefix_cache_queries
    assert computed < looked_up / 4
    assert after.num_output_tokens - before.num_output_tokens == num_requests


def instance(*arguments):
    return SimpleNamespace(args=arguments)


def test_an_empty_context_is_the_end_token(folder):
    requests = [instance("", "The capital of France"), instance("It", " is Paris.")]
    ours, theirs = (open_model(kind, folder).loglikelihood(requests, disable_tqdm=True) for kind in ("nanovllm", "hf"))
    for (own, is_greedy), (expected, was_greedy) in zip(ours, theirs, strict=True):
        assert (own, is_greedy) == (pytest.approx(expected, abs=1e-3), was_greedy)
    spaces, none = open_model("nanovllm", folder).loglikelihood([instance(" ", "a"), instance("", " a")])
    assert spaces == none  # where the `hf` type ends with an assertion


def test_results_are_given_to_the_cache(folder):
    model, told = open_model("nanovllm", folder), []
    hook, model.cache_hook = model.cache_hook, SimpleNamespace(add_partial=lambda *given: told.append(given))
    try:
        (likely,) = model.loglikelihood([instance("a", " b")], disable_tqdm=True)
        (rolled,) = model.loglikelihood_rolling([instance("a b c")], disable_tqdm=True)
        (text,) = model.generate_until([instance("a", {"until": ["\n"], "max_gen_toks": 3})], disable_tqdm=True)
    finally:
        model.cache_hook = hook
    assert [(name, result) for name, _, result in told] == [
        ("loglikelihood", likely), ("loglikelihood_rolling", rolled), ("generate_until", text),
    ]  # fmt: skip


def test_nothing_asked_is_nothing_answered(folder):
    model = open_model("nanovllm", folder)
    assert model.loglikelihood([]) == model.loglikelihood_rolling([]) == model.generate_until([]) == []


def test_what_the_engine_does_not_have_is_refused_by_name(folder):
    model = open_model("nanovllm", folder)
    with pytest.raises(ValueError, match="generation_kwargs has num_beams; the engine takes temperature, top_p"):
        model.generate_until([instance("a", {"until": [], "num_beams": 4})], disable_tqdm=True)
    with pytest.raises(ValueError, match=r"max_gen_toks is 1500; it must be below max_length \(1500\)"):
        model.generate_until([instance("a", {"max_gen_toks": 1500})], disable_tqdm=True)
    with pytest.raises(ValueError, match=r"a continuation has 3000 tokens; it needs 1 to max_length \(1500\)"):
        model._loglikelihood_tokens([(None, [1], [5] * 3000)], disable_tqdm=True)
    with pytest.raises(ValueError, match="max_length and max_model_len are both given"):
        lm_eval_model.NanoVLLM(str(folder), max_length=100, max_model_len=100)
    with pytest.raises(TypeError, match="max_num_seq"):
        lm_eval_model.NanoVLLM(str(folder), max_num_seq=100)


def test_sampled_answers_take_the_tasks_options(folder):
    params = lm_eval_model.NanoVLLM._sampling_params(
        {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "until": ["x"]}, 7
    )
    assert (params.temperature, params.top_p, params.max_tokens, params.stop) == (0.5, 0.9, 7, ("x",))


def test_the_command_knows_the_model_type(folder, tasks, tmp_path):
    command = [
        sys.executable, "-m", "nanovllm.tools.evaluation", "run", "--model", "nanovllm",
        "--model_args", f"pretrained={folder},dtype=float32,max_length=1500,num_kv_blocks=400",
        "--tasks", "store_choice", "--include_path", str(tasks), "--output_path", str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (result,) = (tmp_path / "out").rglob("*.json")
    shown = json.loads(result.read_text())["results"]["store_choice"]["acc,none"]
    expected = evaluate(open_model("hf", folder), tasks, "store_choice")["results"]["store_choice"]["acc,none"]
    assert shown == pytest.approx(expected)
