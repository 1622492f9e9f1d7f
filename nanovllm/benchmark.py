"""`nanovllm bench`: random requests on one engine, and where the time of a step goes.

The parts are timed on the host around the engine's own calls. On a GPU each part waits for the device, so a profiled
run is slower than a plain one; its shares are what counts.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from nanovllm import model_runner
from nanovllm.attention.cpp import CppPlan
from nanovllm.attention.flex import FlexPlan
from nanovllm.attention.sdpa import SdpaPlan
from nanovllm.engine import Engine
from nanovllm.graph_executor import GraphExecutor
from nanovllm.llm import LLM
from nanovllm.model_binding import ModelBinding
from nanovllm.model_runner import ModelRunner
from nanovllm.sampler import Sampler
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler

# What is timed, and under which name; calls within a call of the same name count once.
_TIMED: tuple[tuple[Any, str, str], ...] = (
    (Engine, "step", "step"),
    (Scheduler, "schedule", "schedule"),
    (ModelRunner, "execute", "execute"),
    (model_runner, "build_layout", "inputs"),
    (ModelBinding, "forward_step", "forward"),
    (SdpaPlan, "attend", "attention"),
    (FlexPlan, "attend", "attention"),
    (CppPlan, "attend", "attention"),
    (CppPlan, "attend_by_kernels", "attention"),
    (GraphExecutor, "launch", "graph"),
    (GraphExecutor, "_upload", "inputs"),
    (Sampler, "sample", "sampling"),
    (Scheduler, "update", "update"),
    (Engine, "_collect", "collect"),
)


@dataclass(slots=True)
class StepProfile:
    """Seconds of each part, summed over the steps of `recording`."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    _open: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Time every engine of the process."""
        with ExitStack() as stack:
            for owner, name, part in _TIMED:
                original = getattr(owner, name)
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, self._timed(original, part))
            yield

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._open[part]:
                return function(*args, **kwargs)
            self._open[part] += 1
            _wait_for_device()
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                _wait_for_device()
                self.seconds[part] += time.perf_counter() - begin
                self.calls[part] += 1
                self._open[part] -= 1

        return timed

    def parts(self) -> dict[str, float]:
        """Seconds of disjoint parts, whose sum is that of the steps."""
        of = self.seconds
        if self.calls["graph"]:  # one launch, of which the host sees nothing
            execute = {"build inputs": of["inputs"], "captured step": of["execute"] - of["inputs"]}
        else:
            execute = {
                "build inputs": of["execute"] - of["forward"] - of["sampling"],
                "dense": of["forward"] - of["attention"],
                "attention": of["attention"],
                "sampling": of["sampling"],
            }
        parts = {"schedule": of["schedule"], **execute, "update": of["update"] + of["collect"]}
        return parts | {"other": of["step"] - sum(parts.values())}

    def table(self) -> str:
        steps, total = self.calls["step"], self.seconds["step"]
        lines = [f"{'part':<14}{'ms a step':>10}{'share':>8}"]
        for part, seconds in [*self.parts().items(), ("step", total)]:
            lines.append(f"{part:<14}{1e3 * seconds / steps:>10.3f}{seconds / total:>8.1%}")
        return "\n".join(lines)


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(
    llm: LLM, *, num_requests: int, input_tokens: int, shared_tokens: int, output_tokens: int, profile: bool
) -> dict[str, Any]:
    """Generate greedily for random prompts that all arrive at once, after a warm-up of the same size.

    Args:
        input_tokens: of each prompt, `shared_tokens` of them the same for all.

    Returns tokens per second, sorted seconds to the first token and between tokens (a request's mean), and with
    `profile` the seconds of each part of a step.
    """
    longest = llm.config.max_model_len
    if input_tokens + output_tokens > longest:
        raise ValueError(
            f"{input_tokens} tokens in and {output_tokens} out are more than max_model_len ({longest}); lower them, or "
            "raise it if the model allows."
        )
    vocab_size = llm._open_engine().model_runner.binding.model.config.get_text_config(decoder=True).vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)

    def generate(seed: int) -> list[Any]:
        generator = random.Random(seed)
        shared = generator.choices(range(vocab_size), k=shared_tokens)
        own = input_tokens - shared_tokens
        prompts = [shared + generator.choices(range(vocab_size), k=own) for _ in range(num_requests)]
        return llm.generate(prompts, params, use_tqdm=False)

    generate(0)
    steps = StepProfile()
    with steps.recording() if profile else ExitStack():
        begin, before = time.perf_counter(), llm.stats()
        outputs = generate(1)
        seconds = time.perf_counter() - begin
    for output in outputs:
        if output.error:
            raise RuntimeError(output.error)
    metrics = [output.metrics for output in outputs]
    result: dict[str, Any] = {
        "seconds": seconds,
        "output_tokens_per_second": num_requests * output_tokens / seconds,
        "steps": llm.stats().num_steps - before.num_steps,
        "ttft": sorted(m.first_token_time - m.arrival_time for m in metrics),
        "itl": sorted((m.finished_time - m.first_token_time) / max(1, output_tokens - 1) for m in metrics),
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
    }
    if profile:
        result |= {"parts": steps.parts(), "table": steps.table()}
    return result


def report(result: dict[str, Any]) -> str:
    """A result of `run`, to be read."""
    ttft, itl = statistics.median(result["ttft"]), statistics.median(result["itl"])
    rate, steps = result["output_tokens_per_second"], result["steps"]
    lines = [
        f"{rate:.0f} output tokens/s; {steps} steps in {result['seconds']:.2f} s",
        f"time to first token {1e3 * ttft:.0f} ms, between tokens {1e3 * itl:.1f} ms (medians of the requests)",
        f"{result['cached_tokens']} prompt tokens from the prefix cache",
    ]
    return "\n".join([*lines, *([result["table"]] if "table" in result else [])])
