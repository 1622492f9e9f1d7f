"""lm-eval's `hf` type and ours on one multiple-choice task with a 5-shot prompt: seconds, scores, largest difference.

    python -m bench.machines.evaluation --questions 12 --hf-batch-size 1 4 [--cpu-time]

Needs lm_eval and accelerate. The task is written to a folder; the default model is used, in float32, loaded before. On
a machine with other load, --cpu-time counts the processor's seconds, of all threads.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import torch

from nanovllm.model.default_model import DEFAULT_MODEL
from nanovllm.process.numa import openmp_threads
from tests.support.evaluation_tasks import write_tasks

TASK = "store_choice"
MAX_LENGTH = 2000


def timed(model: Any, manager: Any, clock: Callable[[], float]) -> tuple[float, float, list[float]]:
    """Seconds within the model, accuracy, and the log-likelihood of every answer.

    Args:
        manager: lm_eval's `TaskManager`.
    """
    from lm_eval import simple_evaluate

    seconds = 0.0
    score = model.loglikelihood

    def loglikelihood(*arguments: Any, **options: Any) -> Any:
        nonlocal seconds
        begin = clock()
        try:
            return score(*arguments, **options)
        finally:
            seconds += clock() - begin

    model.loglikelihood = loglikelihood
    found = simple_evaluate(model, tasks=[TASK], task_manager=manager, bootstrap_iters=0, log_samples=True)
    values = [float(answer[0][0]) for sample in found["samples"][TASK] for answer in sample["resps"]]
    return seconds, float(found["results"][TASK]["acc,none"]), values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--hf-batch-size", type=int, nargs="+", default=[1])
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    from nanovllm.tools.evaluation import lm_eval_model

    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(openmp_threads(os.environ) or os.cpu_count() or 1)
    lm_eval_model.register()
    with tempfile.TemporaryDirectory() as folder:
        manager = TaskManager(include_path=str(write_tasks(Path(folder), options.questions)), include_defaults=False)
        ours = get_model("nanovllm")(dtype="float32", max_length=MAX_LENGTH)
        source = ours.llm.tokenizer.name_or_path
        seconds, accuracy, values = timed(ours, manager, clock)
        stats = ours.llm.stats()
        ours.llm.close()
        print(
            f"nanovllm ({DEFAULT_MODEL}): {seconds:.1f} s, accuracy {accuracy:.3f}, "
            f"{stats.num_scheduled_tokens} tokens computed, {stats.prefix_cache_hits} cached",
            flush=True,
        )
        for size in options.hf_batch_size:
            model = get_model("hf")(
                pretrained=source, dtype="float32", device="cpu", max_length=MAX_LENGTH, batch_size=size
            )
            hf_seconds, hf_accuracy, expected = timed(model, manager, clock)
            furthest = max(abs(one - other) for one, other in zip(values, expected, strict=True))
            print(
                f"hf, batch size {size}: {hf_seconds:.1f} s, accuracy {hf_accuracy:.3f}, "
                f"largest difference {furthest:.1e}; ratio {hf_seconds / seconds:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
