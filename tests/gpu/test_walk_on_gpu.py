"""The walk of the default engine on a GPU: the files, functions and room changes of construction and of one token."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CI = Path(__file__).parents[2] / ".ci"
# Files, functions and room changes of a small Llama in bfloat16 on an H200. Memory is measured again where other jobs
# use the GPU: 12,455 room changes alone, 16,317 beside two test runs.
LIMITS = {"construction": (119, 733, 17_000), "one token": (37, 172, 105)}
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from walk import walks
found = {}
for name, walk in walks([[1, 2, 3, 4], [5, 6, 7]], model=sys.argv[2], skip_tokenizer_init=True, max_model_len=512):
    found[name] = (len(walk.files), len(walk.functions), walk.num_room_changes)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The figures of a process of their own, which has imported nothing before."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 1024}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    command = [sys.executable, "-c", PROGRAM, str(CI), str(folder)]
    subprocess.run(command, check=True)  # fills the caches of kernels, as any later start finds them
    return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_the_walk_is_within_its_limits(found, name):
    print(f"walk on a GPU, {name}: {found[name]} of {LIMITS[name]}")
    assert all(figure <= limit for figure, limit in zip(found[name], LIMITS[name], strict=True))
