"""What cannot run on several ranks is refused before a process starts, and a rank that is gone ends all."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
import torch

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.errors import DeviceError, EngineDeadError, StepError, UnsupportedModelError
from nanovllm.fast.gpu.rank_runner import RankRunner
from nanovllm.features.ranks import workers
from nanovllm.features.ranks.ranks import Ranks
from nanovllm.serving.server.app import create_app
from nanovllm.serving.server.settings import ServerSettings
from tests.support.async_llms import collect
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("programs_are_forked")

EAGER = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 65, "max_model_len": 512}


@pytest.fixture
def no_process(monkeypatch):
    def start(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr(workers.subprocess, "Popen", start)


REFUSED = {
    "a size that is none": ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be at least 1"),
    "a size that does not divide": ({"tensor_parallel_size": 4}, "6 attention heads, 2 key and value heads.* 1, 2"),
    "a GPU by its number": (
        {"tensor_parallel_size": 2, "device": "cuda:1"},
        "a GPU by its number as device .*CUDA_VISIBLE_DEVICES",
    ),
    "GPUs that are not there": ({"tensor_parallel_size": 2, "device": "cuda"}, "PyTorch sees no GPU"),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_is_loaded(folder, no_process, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(folder, **EAGER | options)


def test_more_ranks_than_gpus_are_refused(folder, no_process, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, but PyTorch sees 1 GPU"):
        LLM(folder, tensor_parallel_size=2, device="cuda")


def test_a_loaded_module_is_refused(no_process):
    with pytest.raises(
        ValueError, match=r"a loaded module as model does not work with tensor_parallel_size: .* folder"
    ):
        LLM(tiny_model(), tensor_parallel_size=2, **EAGER)


@pytest.mark.parametrize("name", ["nanovllm.features.composition.binding.check_rows", "torch.set_num_threads"])
def test_the_own_error_of_a_worker_is_told(name, folder, monkeypatch):
    module, _, function = name.rpartition(".")
    entry = f"import {module} as b; b.{function} = lambda *_: 1 / 0; {workers.ENTRY}"
    monkeypatch.setattr(workers, "ENTRY", entry)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        LLM(folder, tensor_parallel_size=2, **EAGER)


DEATHS = {
    "at its start": "raise SystemExit(9)",
    "before it joins the group": "import nanovllm.features.ranks.workers as w, os; w.Ranks = lambda *_: os._exit(9)",
    "in the middle of joining": (
        "import nanovllm.features.ranks.ranks as r, os; own = r.dist.ProcessGroupGloo.create_device\n"
        "r.dist.ProcessGroupGloo.create_device = lambda **_: os._exit(9)"
    ),
    "before the first collective": (
        "import nanovllm.features.ranks.workers as w, os; own = w.Ranks\n"
        "w.Ranks = lambda *arguments: (own(*arguments), os._exit(9))"
    ),
}


@pytest.mark.parametrize("moment", DEATHS)
def test_a_worker_that_ends_before_the_ranks_have_met_ends_the_construction(folder, monkeypatch, moment):
    monkeypatch.setattr(workers, "ENTRY", f"{DEATHS[moment]}\n{workers.ENTRY}")
    with pytest.raises(DeviceError, match=r"rank 1 \(process \d+\) ended with exit code 9"):
        LLM(folder, tensor_parallel_size=2, **EAGER)


async def eventually(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.02)


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def worker_of(llm):
    return llm._engine.model_runner.workers._processes[0]


def test_a_rank_killed_in_a_step_kills_the_engine_within_seconds(folder, four_threads):
    within = []

    def look(token_ids, logits):
        within.append(torch.get_num_threads())
        return logits

    with LLM(folder, tensor_parallel_size=2, **EAGER) as llm:
        assert torch.get_num_threads() == 4
        stream = llm.stream([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=400, logits_processors=(look,)))
        next(stream)
        assert set(within) == {2} and torch.get_num_threads() == 4, "a share within the step, all outside of it"
        worker = worker_of(llm)
        worker.kill()
        with pytest.raises(StepError, match=r"rank 1 \(process \d+\) ended with exit code -9"):
            for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="exit code -9"):
            llm.generate([[1, 2]], use_tqdm=False)
        assert worker.poll() is not None
    assert torch.get_num_threads() == 4


def test_a_rank_that_hangs_is_given_up(folder, monkeypatch):
    with LLM(folder, tensor_parallel_size=2, **EAGER) as llm:
        os.kill(worker_of(llm).pid, signal.SIGSTOP)
        monkeypatch.setattr(workers, "HANG_SECONDS", 3.0)
        with pytest.raises(StepError, match=r"rank 1 \(process \d+\) ended with exit code -9"):
            llm.generate([[1, 2, 3]], use_tqdm=False)


async def test_a_rank_killed_while_idle_kills_the_engine_within_seconds_and_health_says_so(folder, four_threads):
    async with AsyncLLM(folder, tensor_parallel_size=2, **EAGER) as llm:
        transport = httpx.ASGITransport(create_app(llm, ServerSettings(ui=False), model="tiny"))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            assert (await client.get("/health")).status_code == 200
            worker_of(llm._engine_thread).kill()
            await eventually(lambda: llm.is_dead)
            answer = await client.get("/health")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        with pytest.raises(EngineDeadError, match=r"DeviceError: .*rank 1 \(process \d+\) ended with exit code -9"):
            await collect(llm.generate([1, 2, 3], SamplingParams(max_tokens=4)))
        with pytest.raises(EngineDeadError):
            await llm.stats()
    assert torch.get_num_threads() == 4, "though the engine was closed in another thread"


def test_a_rank_killed_while_idle_fails_the_next_call_at_once(folder):
    with LLM(folder, tensor_parallel_size=2, **EAGER) as llm:
        worker_of(llm).kill()
        worker_of(llm).wait()
        with pytest.raises((StepError, EngineDeadError), match="exit code -9"):
            llm.generate([[1, 2, 3]], use_tqdm=False)


@pytest.mark.full
def test_a_forgotten_engine_ends_its_workers(folder):
    llm = LLM(folder, tensor_parallel_size=2, **EAGER)
    worker = worker_of(llm)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    del llm
    gc.collect()
    assert worker.wait(10) is not None


def test_the_other_ranks_end_with_the_first(folder):
    program = (
        "import os, signal, sys, time\nfrom nanovllm import LLM\n"
        f"llm = LLM({str(folder)!r}, tensor_parallel_size=2, **{EAGER!r})\n"
        "print(llm._engine.model_runner.workers._processes[0].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        worker = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{worker}")


def test_unsupported_models_are_refused_by_name(tmp_path, no_process):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel has no tensor parallel plan"):
        LLM(tmp_path, tokenizer=object(), tensor_parallel_size=2)


def test_an_abort_at_the_end_of_python_or_of_a_failed_device_is_quiet(monkeypatch):
    class Failed:
        asked = 0

        def abort(self):
            self.asked += 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def start(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")  # since Python 3.12

    ranks = object.__new__(Ranks)
    ranks.device, ranks._is_aborted, ranks._one_shot, ranks._group = torch.device("cuda"), False, Failed(), Failed()
    monkeypatch.setattr("threading.Thread.start", start)
    ranks.abort()
    ranks.abort()
    assert ranks._one_shot.asked == 1


def test_an_engine_closes_though_a_rank_is_stuck_in_a_step(monkeypatch):
    monkeypatch.setattr("nanovllm.fast.gpu.rank_runner.CLOSE_SECONDS", 0.01)
    is_aborted, events = threading.Event(), []
    runner = object.__new__(RankRunner)
    runner.workers = SimpleNamespace(abort=is_aborted.set, close=lambda: events.append("workers ended"))

    def wait_for_device(_):
        events.append(is_aborted.wait(10))

    monkeypatch.setattr("nanovllm.model_runner.ModelRunner.close", wait_for_device)
    runner.close()
    assert events == [True, "workers ended"]
