"""Tiny models behind two engine processes, and what may be done to these."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams, StepRecord
from nanovllm.outputs import RequestOutput
from tests.support.tiny_models import save_tiny

OPTIONS: dict[str, Any] = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
REPLICAS = OPTIONS | {"data_parallel_size": 2}
STEPS: list[tuple[int, StepRecord]] = []
# Arguments that are no features: the object itself, what a call is about, and bundles of options.
ARGUMENTS = {
    "self", "options", "sampling_params", "prompt", "messages", "token_ids", "add_special_tokens", "tools",
    "template_options", "request_ids", "look", "use_tqdm",
}  # fmt: skip
ENDLESS = SamplingParams(seed=11, max_tokens=400, ignore_eos=True)


@functools.cache
def tiny_folder() -> str:
    """The tiny model and its tokenizer on disk, for all tests of this process."""
    return str(save_tiny(Path(tempfile.mkdtemp(prefix="nanovllm-tiny-"))))


@functools.cache
def one_engine() -> LLM:
    """The same model without replicas."""
    return LLM(tiny_folder(), **OPTIONS)


@functools.cache
def shared_pool() -> LLM:
    """Two replicas, shared by tests that leave both up; STEPS has the steps of both, and who was told of them."""
    llm = LLM(tiny_folder(), max_queue=64, on_step=lambda step: STEPS.append((threading.get_ident(), step)), **REPLICAS)
    atexit.register(llm.close)
    return llm


def completions(outputs: list[RequestOutput]) -> list[list[tuple[Any, ...]]]:
    """What each prompt got, in a form to compare."""
    return [
        [(c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs] for output in outputs
    ]


def process_ids(llm: Any) -> list[int]:
    return [replica.process_id for replica in llm.replicas()]


def send_signal(llm: Any, index: int, number: int) -> None:
    os.kill(process_ids(llm)[index], number)


def kill(llm: Any, index: int) -> None:
    """kill -9 of one replica's process."""
    send_signal(llm, index, signal.SIGKILL)


def busiest(llm: Any) -> int:
    """The replica that runs most."""
    return max(llm.replicas(), key=lambda replica: replica.num_running).index


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def all_up(llm: LLM) -> bool:
    """Whether every replica is up; takes a step, since an `LLM` works only while it is called."""
    llm._engine.step()
    return all(replica.state == "up" for replica in llm.replicas())


def is_alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
