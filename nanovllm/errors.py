"""Exceptions of loading a model, of a running engine and of its requests."""

from __future__ import annotations

import os
from typing import Any


class ModelLoadError(ValueError):
    """The model or its tokenizer could not be found or read; the message names the missing part and its path."""


class UnsupportedModelError(ValueError):
    """The model needs a feature that the engine does not have; the message names it and an alternative.

    `reason` is its key in `nanovllm.features.unsupported.REASONS`; empty if another option allows the model.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class KernelBuildError(RuntimeError):
    """The C++ kernels could not be compiled; the message has the compiler's last words."""


class ProcessorClassError(ValueError):
    """NANOVLLM_CPU_CLASS names no class of processors that includes this one."""


class DeviceError(RuntimeError):
    """The device failed, and its memory can no longer be trusted."""


class StepError(RuntimeError):
    """A step failed and was undone; its requests (`request_ids`) are still queued."""

    def __init__(self, request_ids: list[str], cause: BaseException) -> None:
        named = ", ".join(request_ids[:8]) + (f" and {len(request_ids) - 8} more" if len(request_ids) > 8 else "")
        super().__init__(f"a step failed ({type(cause).__name__}: {cause}); requests in it: {named}")
        self.request_ids = request_ids


class EngineDeadError(RuntimeError):
    """The engine failed and holds no usable state; every later call raises this, with the failure as its cause.

    Build a new engine, after a DeviceError in a new process.
    """


class EngineClosedError(RuntimeError):
    """The engine was closed."""


class ForkedChildError(RuntimeError):
    """A call in a forked child, which has the engine's memory, but neither its threads nor their locks.

    A lock may be held there for ever by a thread that does not exist, so the process is compared before any is taken.
    """

    def __init__(self, owner: str, process_id: int) -> None:
        super().__init__(
            f"this {owner} lives in process {process_id}, and a forked child (process {os.getpid()}) cannot "
            "use it; build one there. PyTorch's threads do not survive a fork either: start such a process by "
            'multiprocessing\'s "spawn" method, or call torch.set_num_threads(1) in it first.'
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # With the child's message: a pool's worker sends its errors to the parent.
        return RuntimeError.__new__, (type(self), *self.args)


class PromptTooLongError(ValueError):
    """The prompt leaves no room for a new token within max_model_len."""


def too_long(has: str, max_model_len: int) -> PromptTooLongError:
    """The error for a prompt; `has` says how long it is."""
    return PromptTooLongError(
        f"the prompt has {has}, which leaves no room for a new one within max_model_len "
        # In OpenAI's words, which LiteLLM and others look for.
        f"({max_model_len}): this model's maximum context length is {max_model_len} tokens. Shorten it to at most "
        f"{max_model_len - 1} tokens (truncate_prompt_tokens does), or "
        "raise max_model_len if the model and the KV cache allow."
    )


class QueueFullError(RuntimeError):
    """The queue holds `max_queue` requests; nothing was added, and the call can be retried later."""


class NotFusedError(ValueError):
    """A layer has no fused form and runs unfused; the message names the difference."""
