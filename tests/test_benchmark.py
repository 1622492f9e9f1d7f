"""`nanovllm bench`: what it measures adds up, and it leaves nothing behind."""

from __future__ import annotations

import json

import pytest

from nanovllm import LLM, benchmark
from nanovllm.benchmark import _TIMED, StepProfile
from nanovllm.cli import main
from tests.tiny_models import save_tiny

ENGINE = ["--block-size", "16", "--num-kv-blocks", "129", "--max-model-len", "512"]
SIZES = ["--num-requests", "5", "--input-tokens", "40", "--shared-tokens", "32", "--output-tokens", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("models") / "model"))


def test_the_parts_of_a_step_sum_up_to_it(folder, capsys):
    assert main(["bench", "--model", folder, "--profile", "--json", *SIZES, *ENGINE]) == 0
    result = json.loads(capsys.readouterr().out)
    assert all(seconds >= 0 for part, seconds in result["parts"].items() if part != "other")
    for part in ("schedule", "build inputs", "dense", "attention", "sampling", "update"):
        assert result["parts"][part] > 0, part
    assert sum(result["parts"].values()) <= result["seconds"]
    assert len(result["ttft"]) == len(result["itl"]) == 5
    assert result["cached_tokens"] == 4 * 32  # four of the five find the prefix that the first computes
    assert result["output_tokens_per_second"] == pytest.approx(30 / result["seconds"])


def test_the_report_is_a_table_that_ends_with_the_whole_step(folder, capsys):
    assert main(["bench", "--model", folder, "--profile", *SIZES, *ENGINE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "output tokens/s" in lines[0]
    assert lines[-1].split()[0] == "step" and lines[-1].split()[-1] == "100.0%"


def test_without_profile_no_part_is_timed(folder, capsys, monkeypatch):
    monkeypatch.setattr(StepProfile, "recording", lambda self: pytest.fail("it was not asked for"))
    assert main(["bench", "--model", folder, *SIZES, *ENGINE]) == 0
    assert "attention" not in capsys.readouterr().out


def test_the_engine_is_as_it_was_after_a_profile(folder):
    before = [getattr(owner, name) for owner, name, _ in _TIMED]
    sizes = {"num_requests": 2, "input_tokens": 8, "shared_tokens": 0, "output_tokens": 3}
    with LLM(folder, block_size=16, num_kv_blocks=129, max_model_len=512) as llm:
        benchmark.run(llm, **sizes, profile=True)
        assert [getattr(owner, name) for owner, name, _ in _TIMED] == before
        with pytest.raises(KeyError), StepProfile().recording():
            raise KeyError
    assert [getattr(owner, name) for owner, name, _ in _TIMED] == before


def test_a_call_within_a_call_of_the_same_part_counts_once():
    profile = StepProfile()
    inner = profile._timed(lambda: None, "attention")
    profile._timed(lambda: (inner(), inner()), "attention")()
    assert profile.calls == {"attention": 1}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--num-requests", "0"], "--num-requests is 0"),
        (["--output-tokens", "0"], "--output-tokens is 0"),
        (["--input-tokens", "8", "--shared-tokens", "9"], "--shared-tokens is 9"),
        (["--input-tokens", "500", "--output-tokens", "13"], "500 tokens in and 13 out"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(folder, capsys, arguments, named):
    assert main(["bench", "--model", folder, *arguments, *ENGINE]) == 2
    assert named in capsys.readouterr().err


def test_a_negative_count_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--shared-tokens", "-1"])
    assert "-1 is no count" in capsys.readouterr().err
