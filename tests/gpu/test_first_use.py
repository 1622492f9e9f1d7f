"""The first use of an option: no kernel is compiled for it, and rehearsals leave answers as they are."""

import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.fast.gpu.rehearsal import rehearsal_batch
from tests.support.tiny_models import tiny_model, tiny_tokenizer

OPTIONS = """
[{}, {"temperature": 0.0}, {"temperature": 0.01}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1},
 {"repetition_penalty": 1.1}, {"repetition_penalty": 1.1, "top_p": 0.9}, {"presence_penalty": 0.5, "logprobs": 3},
 {"logprobs": 0}, {"logprobs": 20, "top_k": 5}, {"logprobs": 40}, {"logit_bias": {5: 1.0}},
 {"logit_bias": {5: 1.0}, "frequency_penalty": 0.5, "logprobs": 1, "top_p": 0.9}, {"allowed_token_ids": (1, 2, 3)},
 {"min_tokens": 4}, {"bad_words": ("a",)}, {"prompt_logprobs": 2}, {"n": 3},
 {"logits_processors": (lambda token_ids, logits: logits,)},
 {"structured_output": StructuredOutput(regex="[ab]{3}")},
 {"structured_output": StructuredOutput(regex="[ab]{3}"), "top_p": 0.9, "repetition_penalty": 1.1},
 {"structured_output": StructuredOutput(regex="[ab]{3}"), "logit_bias": {5: 1.0}, "min_p": 0.1}]
"""
SCRIPT = f"""
import sys
from triton import knobs
from torch._dynamo.callback import on_compile_start
from nanovllm import LLM, SamplingParams, StructuredOutput
from tests.support.tiny_models import tiny_tokenizer

compiled = []
llm = LLM(sys.argv[1], tokenizer=tiny_tokenizer(), dtype="bfloat16", max_num_seqs=32, num_kv_blocks=200)
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4), use_tqdm=False)
knobs.compilation.listener = lambda *, src, **_: compiled.append(getattr(src, "name", str(src)))
on_compile_start(lambda *_: compiled.append("torch.compile"))
for options in {OPTIONS.strip()}:
    for prompts in ([[5, 6, 7]], [[7, 8, 9] * number for number in range(1, 12)]):
        before = len(compiled)
        llm.generate(prompts, SamplingParams(max_tokens=5, **options), use_tqdm=False)
        if compiled[before:]:
            print(options, len(prompts), compiled[before:])
llm.embed([[5, 6, 7]], use_tqdm=False)
print("compiled:", compiled)
"""


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_no_option_compiles_a_kernel_at_its_first_use(family, tmp_path):
    """In a process of its own, since other tests compile the same kernels."""
    tiny_model(family, eos_token_id=3).save_pretrained(tmp_path)
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1:] == ["compiled: []"], run.stdout + run.stderr


def test_rehearsals_use_each_option_and_leave_the_same_answers(tmp_path, caplog):
    tiny_model("qwen3").save_pretrained(tmp_path)
    prompts = [[5, 6, 7], [8] * 70]
    params = [
        SamplingParams(max_tokens=8, temperature=0.0),
        SamplingParams(max_tokens=8, seed=1, top_p=0.9, logprobs=2),
    ]
    with LLM(tmp_path, tokenizer=tiny_tokenizer(), max_num_seqs=8, num_kv_blocks=100, max_model_len=300) as llm:
        runner = llm._engine.model_runner  # type: ignore[union-attr]
        before = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        with caplog.at_level("INFO", "nanovllm"):
            while rehearsal_batch(runner.binding, runner.config, runner.paths.num_rehearsed) is not None:
                assert runner.capture_ahead()
        assert runner.paths.num_rehearsed > 60 and "rehearsal" not in caplog.text
        assert runner.executor.capture_ahead()  # of a head that a rehearsal had without a graph
        for _ in range(2):
            assert [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)] == before
            llm.reset_prefix_cache()
