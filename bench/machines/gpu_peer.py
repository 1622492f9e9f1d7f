"""vLLM on workloads of `gpu.py`: long and short prompts, one request, W1, and an 8-billion-parameter shape.

    $VLLM_PYTHON bench/machines/gpu_peer.py 0.6b-128k
    $VLLM_PYTHON bench/machines/gpu_peer.py 8b

Dummy weights of that shape, no text. Each workload runs once uncounted, then three times, with an empty prefix cache.
Run `gpu.py` on the same machine: a ratio of two machines says little.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # gpu.py finds what is beside it

from bench.machines.gpu import PROMPTS
from bench.machines.random_models import SHAPES
from bench.machines.traffic_engines import VllmOffline
from nanovllm.tools.workloads.workloads import Workload, random_requests, w1

MOST_TOKENS = {"0.6b-128k": 131_072, "8b": 9216}  # of a sequence, by shape
REPEATS = 3


def workloads(shape: str) -> dict[str, Workload]:
    """By name; of two that differ in their outputs alone, the difference is the time of decodes."""
    if shape == "8b":
        mixed = w1()
        return {
            "8 x 8,192": random_requests(requests=8, prompt=8192, output=1),
            "one of 384, 120 out": random_requests(requests=1, prompt=384, output=120),
            "one of 384, 1 out": random_requests(requests=1, prompt=384, output=1),
            "64 of 512, 256 out": random_requests(requests=64, prompt=512, output=256),
            "64 mixed": dataclasses.replace(mixed, requests=mixed.requests[:64]),
        }
    found = {name: random_requests(requests=n, prompt=length, output=1) for name, (n, length) in PROMPTS.items()}
    for length in (128, 2048):
        for output in (513, 1):
            found[f"W3, {length} in, {output} out"] = random_requests(requests=1, prompt=length, output=output)
    return found | {"W1": w1()}


def config_folder(shape: str) -> str:
    """A folder with the shape's configuration alone."""
    fields = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
              "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "attention_bias": False,
              "tie_word_embeddings": True, "bos_token_id": 151_643, "eos_token_id": 151_645}  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="nanovllm-peer-"))
    (folder / "config.json").write_text(json.dumps(fields | SHAPES[shape]), encoding="utf-8")
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[*MOST_TOKENS])
    shape = parser.parse_args().shape
    engine = VllmOffline(config_folder(shape), {
        "load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": 256, "max_num_batched_tokens": 8192,
        "max_model_len": MOST_TOKENS[shape],
    })  # fmt: skip
    for name, workload in workloads(shape).items():
        prompts = [request.prompt_token_ids for request in workload.requests]
        params = [
            {"temperature": 0.6, "ignore_eos": True, "max_tokens": request.num_output_tokens}
            for request in workload.requests
        ]
        seconds = []
        for _ in range(1 + REPEATS):
            engine.reset_prefix_cache()
            seconds.append(engine.generate(prompts, params))
        print(f"{shape}, {name}: {', '.join(f'{each:.4f}' for each in seconds[1:])} s", flush=True)


if __name__ == "__main__":
    main()
