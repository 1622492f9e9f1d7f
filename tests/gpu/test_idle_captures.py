"""Idle time between calls of every option: answers are those of an engine without it, and no access is out of bounds.

Each engine has a process of its own: an access out of bounds takes the whole process's device with it.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.structured import EOS
from tests.support.tiny_classes import tiny_class_model
from tests.support.tiny_models import save_tiny

ROOT = Path(__file__).resolve().parents[2]
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
SCRIPT = """
import sys
from nanovllm import LLM, SamplingParams
from tests.support.option_traffic import answers
from tests.support.tiny_classes import VOCAB_SIZE
from tests.support.tiny_models import tiny_tokenizer

folder, num_calls, has_text, given = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "text", eval(sys.argv[4])
options = {"num_kv_blocks": 60, "max_model_len": 448, "max_num_seqs": 24, "max_num_batched_tokens": 256, "seed": 5}
options |= {"tokenizer": tiny_tokenizer()} if has_text else {"skip_tokenizer_init": True}
sizes = {"longest": 400} if has_text else {"longest": 400, "has_text": False, "vocab_size": VOCAB_SIZE}

def found(idle):
    with LLM(folder, **(options | given)) as llm:
        each = []
        for seed in range(num_calls):
            each.append(answers(llm, seed, **sizes))
            for crowd in ([[5, 6, 7]] * 20, [[8, 9] * 150]):  # heads of two sizes, and entries of the smaller one last
                llm.generate(crowd, SamplingParams(repetition_penalty=1.1, max_tokens=4), use_tqdm=False)
            while idle and llm._engine.use_idle_time(captures=True):
                pass
        executor = llm._engine.model_runner.executor
        heads = {head for head in executor._heads.graphs if head.penalises}
        assert not idle or len({head.num_samples for head in heads}) > 1, heads
        return each

expected, own = found(False), found(True)
assert own == expected, [seed for seed in range(num_calls) if own[seed] != expected[seed]]
print("the same")
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {
        family: save_tiny(tmp_path_factory.mktemp(family), family, eos_token_id=EOS) for family in ("llama", "qwen3")
    }
    found["hybrid"] = tmp_path_factory.mktemp("hybrid")
    tiny_class_model("Qwen3_5ForCausalLM").save_pretrained(found["hybrid"])
    return found


def check(folder, *arguments, before=()):
    command = [*before, sys.executable, "-c", SCRIPT, str(folder), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "the same" in done.stdout.splitlines(), done.stdout[-4000:] + done.stderr[-4000:]


WAYS = {
    "overlapped": ("llama", "text", "{}"),
    "one by one": ("qwen3", "text", "{'overlap': False}"),
    "drafts": ("llama", "text", "{'speculation': 'suffix'}"),
    "recurrent states": ("hybrid", "token ids", "{'block_size': 64}"),
}


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
def test_idle_time_between_calls_of_every_option_changes_no_answer(folders, way):
    family, *arguments = WAYS[way]
    check(folders[family], "12", *arguments)


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.skipif(
    SANITIZER is None, reason="needs compute-sanitizer, which is neither on the path nor in CUDA's folder"
)
def test_no_capture_of_idle_time_reads_or_writes_out_of_bounds(folders, way):
    family, *arguments = WAYS[way]
    check(folders[family], "4", *arguments, before=(str(SANITIZER), "--tool", "memcheck", "--error-exitcode", "9"))
