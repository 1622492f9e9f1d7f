"""A part whose folder was deleted: the engine runs without it, and its options are refused by name.

`.ci/deletions.py` hides each folder in turn, and compares a batch with transformers.
"""

import dataclasses
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

import nanovllm.build
from nanovllm.features.engine_config import EngineConfig
from nanovllm.model_runner import StepPaths
from nanovllm.scheduler import WaitingQueue, WholeBudget
from tests.support.llms import generate, open_llm, token_ids
from tests.support.refusals import invalid


@pytest.mark.parametrize(
    "module, options",
    [
        ("features.goals.building", {"itl_goal": 0.1}),
        ("features.shares.client_queue", {"client_weights": {"a": 2.0}}),
        ("features.kv_events.kv_events", {"kv_events": "tcp://127.0.0.1:5557"}),
        ("observability.step_records", {"on_step": print}),
        ("features.speculation.build", {"speculation": "suffix"}),
        ("features.tiers.prefix_tiers", {"prefix_cache_host_bytes": 1 << 24}),
    ],
)
def test_an_option_without_its_folder_is_refused_by_name(module, options, monkeypatch):
    monkeypatch.setitem(sys.modules, f"nanovllm.{module}", None)
    with invalid(f"{next(iter(options))}.* is set, and nanovllm.{module}, which it needs"):
        open_llm(**options)


def test_the_folder_of_an_option_is_missed_before_a_model_is_looked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "nanovllm.features.speculation.build", None)
    with invalid(r"^speculation is set, and nanovllm\.features\.speculation\.build,"):
        nanovllm.build.build_engine("no-such-model", None, None, {"speculation": "suffix"})


def test_each_option_names_a_part_that_is_there():
    named = {field.metadata["needs"] for field in dataclasses.fields(EngineConfig)} - {""}
    assert len(named) > 5
    for module in named:
        import_module(f"nanovllm.{module}")


def test_without_faster_steps_shares_and_records_the_engine_has_its_own(monkeypatch):
    prompts = [[1, 2, 3], [5] * 40]
    with open_llm() as llm:
        expected = token_ids(generate(llm, prompts))
    monkeypatch.setitem(sys.modules, "nanovllm.fast.choice", None)
    monkeypatch.setitem(sys.modules, "nanovllm.features.shares.client_queue", None)
    monkeypatch.setitem(sys.modules, "nanovllm.observability.step_records", None)
    with open_llm() as llm:
        scheduler = llm._engine.scheduler
        assert isinstance(scheduler.waiting, WaitingQueue) and isinstance(scheduler.budget, WholeBudget)
        assert type(llm._engine.model_runner.paths) is StepPaths
        assert token_ids(generate(llm, prompts)) == expected
        assert llm.stats().num_output_tokens == 24
        with invalid(r"built without `nanovllm\.observability`"):
            llm._engine.observers.append(print)


def test_every_part_that_is_asked_for_is_there():
    """Else an engine would run without it, and only the log would say so."""
    source = Path(nanovllm.build.__file__).read_text(encoding="utf-8")
    parts = re.findall(r'_part\("([\w.]+)", "(\w+)"', source)
    assert len(parts) > 8
    for module, name in parts:
        assert hasattr(import_module(f"nanovllm.{module}"), name), (module, name)


def test_a_fault_within_a_part_is_not_taken_for_a_missing_folder(monkeypatch):
    monkeypatch.setitem(sys.modules, "nanovllm.fast.choice", None)
    monkeypatch.setitem(sys.modules, "heapq", None)
    monkeypatch.delitem(sys.modules, "nanovllm.features.shares.client_queue")
    with pytest.raises(ModuleNotFoundError, match="heapq"):
        open_llm()
