"""Errors of loading a model and of a running engine."""

from __future__ import annotations


class ModelLoadError(ValueError):
    """The model or its tokenizer could not be found or read; the message names what is missing and where."""


class UnsupportedModelError(ValueError):
    """The model does something in attention that the engine does not implement; the message names it."""


class KernelBuildError(RuntimeError):
    """The C++ kernels could not be compiled; the message has the compiler's last words."""


class DeviceError(RuntimeError):
    """The device itself failed; nothing that it holds can be trusted any more."""


class StepError(RuntimeError):
    """A step failed and was undone; its requests, named in `request_ids`, are still queued."""

    def __init__(self, request_ids: list[str], cause: BaseException) -> None:
        named = ", ".join(request_ids[:8]) + (f" and {len(request_ids) - 8} more" if len(request_ids) > 8 else "")
        super().__init__(f"a step failed ({type(cause).__name__}: {cause}); requests in it: {named}")
        self.request_ids = request_ids


class EngineDeadError(RuntimeError):
    """The engine met an error that it cannot go on after: it holds no usable state, and says so to every later call.

    Its cause is the error. Build a new engine, after a device error in a new process.
    """


class EngineClosedError(RuntimeError):
    """The engine was closed by its owner."""


class PromptTooLongError(ValueError):
    """The prompt leaves no room for a new token within max_model_len."""


class QueueFullError(RuntimeError):
    """As many requests wait as `max_queue` allows; nothing was queued, and the same may be tried again later."""
