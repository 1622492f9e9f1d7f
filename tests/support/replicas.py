"""Tiny models behind two engine processes, and what may be done to these."""

import atexit
import functools
import os
import signal
import tempfile
import threading
from pathlib import Path

from nanovllm import LLM, SamplingParams
from tests.support.llms import OPTIONS, comes_true
from tests.support.tiny_models import save_tiny

REPLICAS = OPTIONS | {"data_parallel_size": 2}
STEPS = []
ENDLESS = SamplingParams(seed=11, max_tokens=400, ignore_eos=True)


@functools.cache
def tiny_folder():
    """The tiny model and its tokenizer on disk, for all tests of this process."""
    return str(save_tiny(Path(tempfile.mkdtemp(prefix="nanovllm-tiny-"))))


@functools.cache
def one_engine():
    """The same model without replicas."""
    return LLM(tiny_folder(), **OPTIONS)


@functools.cache
def _pool():
    llm = LLM(tiny_folder(), max_queue=64, on_step=lambda step: STEPS.append((threading.get_ident(), step)), **REPLICAS)
    atexit.register(llm.close)
    return llm


def shared_pool():
    """Two replicas, both up whatever the test before has killed; STEPS has the steps, and who was told of them."""
    wait_until_up(_pool())
    return _pool()


def completions(outputs):
    """What each prompt got, in a form to compare."""
    return [
        [(c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs] for output in outputs
    ]


def process_ids(llm):
    return [replica.process_id for replica in llm.replicas()]


def send_signal(llm, index, number):
    os.kill(process_ids(llm)[index], number)


def kill(llm, index):
    """kill -9 of one replica's process."""
    send_signal(llm, index, signal.SIGKILL)


def busiest(llm):
    """The replica that runs most."""
    return max(llm.replicas(), key=lambda replica: replica.num_running).index


def wait_until_up(llm):
    def all_up():
        llm._engine.step()  # an `LLM` works only while it is called
        return all(replica.state == "up" and is_alive(replica.process_id) for replica in llm.replicas())

    comes_true(all_up)


def is_alive(process_id):
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def answers(llm, prompts, params, **options):
    """What each prompt gets of an engine, in a form to compare."""
    return completions(llm.generate(prompts, params, use_tqdm=False, **options))


def assert_as_one_engine(llm, prompts, params, **options):
    """Check that replicas answer as one engine does."""
    assert answers(llm, prompts, params, **options) == answers(one_engine(), prompts, params, **options)
