"""A causal language model's own forward in two parts, the hidden states and the head, and their readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.logprobs.logprobs import StepLogprobs
from nanovllm.model import AttributePatches, ModelBinding, WholePass, modules_of
from nanovllm.probe import PassProbe


class _BaseModelOutput(Exception):
    """Ends a forward pass after the base model."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class ForwardPasses:
    """Forward passes of one model, whole or split at the head; paged attention or a probe must be installed.

    In the place of `WholePass` in a binding.

    Both parts run the model's own forward with its base model replaced, so that its operations on hidden states and
    logits (norms, scales, soft caps) are kept.

    Args:
        patches: undone by their owner if an interrupt cuts a pass short.
        vocab_size: tokens that can be sampled.
    """

    def __init__(self, model: Any, patches: AttributePatches, vocab_size: int) -> None:
        self._model = model
        self._patches = patches
        self.logits: Callable[..., Tensor] = WholePass(model, vocab_size).logits
        self.has_base_model = False  # False until a pass has shown one
        self._base_output_type: Any = None
        self._no_token: Tensor | None = None  # [1, 1], of a pass that computes the head alone
        self.direct: Any = None  # `DirectPass` or `Trial`, for steps
        self.head_layer: Any = None  # `HeadLayer`, which drafts
        self.given: Any = None  # `GivenRows`: features and positions of rows of the coming step

    def with_logits_of(self, vocab_size: int) -> ForwardPasses:
        """The passes with logits of other tokens."""
        passes = ForwardPasses(self._model, self._patches, vocab_size)
        passes.has_base_model = self.has_base_model
        return passes

    def of_step(self, report: StepLogprobs | None, *inputs: Tensor, **kwargs: Any) -> Tensor:
        """Logits of a step as by `logits`, empty if the report needs none; fills the report."""
        if report is None:
            compute = self.logits if self.direct is None or not self.direct.is_ready else self.direct
            return compute(*inputs, **kwargs)
        if report.needs_logits:
            return self.whole(report, *inputs, **kwargs)
        token_ids, positions, sample_rows = inputs
        states = self.hidden_states(token_ids, positions, **kwargs)
        report.take_states(states, sample_rows)
        return states.new_empty(len(sample_rows), 0)

    def whole(self, report: StepLogprobs | None, *inputs: Tensor, **kwargs: Any) -> Tensor:
        """Logits of a step, computed even if the report needs none; fills the report, like `of_step`."""
        if report is None or not report.reads_rows:
            return self.of_step(None, *inputs, **kwargs)
        return self.reported(report, *inputs, **kwargs)

    def drop_copies(self) -> None:
        self.direct = None

    def reported(
        self, report: StepLogprobs, token_ids: Tensor, positions: Tensor, sample_rows: Tensor, **kwargs: Any
    ) -> Tensor:
        """Logits, like `logits`; fills the report (prompt logprobs, embeddings) from the same pass of the layers."""
        inputs = token_ids, positions
        with self._base_model_runs_once() as outputs:
            for rows in report.prompt_rows_in_pieces(token_ids.device):
                report.add_prompt(self.logits(*inputs, rows, **kwargs))
            # Last, since a packed head reuses one buffer for its logits.
            logits = self.logits(*inputs, sample_rows, **kwargs)
        if report.reads_states:
            report.take_states(outputs[0].last_hidden_state[0], sample_rows)
        return logits

    @contextmanager
    def _base_model_runs_once(self) -> Iterator[list[Any]]:
        """Return the base model's first output for repeated calls too; yields it in a list."""
        base: Any = self._model.base_model
        given: list[Any] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not given:
                given.append(base._call_impl(*args, **kwargs))
            return given[0]

        with self._base_model_as(run):
            yield given

    def hidden_states(self, token_ids: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
        """Hidden states [num_rows, hidden_size] of all rows; the arguments are those of `logits`."""
        base: Any = self._model.base_model

        def run(*args: Any, **kwargs: Any) -> Any:
            raise _BaseModelOutput(base._call_impl(*args, **kwargs))

        try:
            with self._base_model_as(run):
                self.logits(token_ids, positions, positions[0], **kwargs)
        except _BaseModelOutput as result:
            self._base_output_type = type(result.output)
            hidden_states: Tensor = result.output.last_hidden_state[0]
            return hidden_states
        raise RuntimeError(f"{type(self._model).__name__} computed logits without its base model.")

    def head(self, hidden_states: Tensor) -> Tensor:
        """Logits [num_samples, vocab_size] of hidden states [num_samples, hidden_size]."""
        output = self._base_output_type(last_hidden_state=hidden_states[None])
        # Made once, not in each step; a real token, since a custom forward may read it.
        if self._no_token is None or self._no_token.device != hidden_states.device:
            with torch.inference_mode(False):
                self._no_token = hidden_states.new_zeros((1, 1), dtype=torch.int64)
        no_tokens = self._no_token.expand(1, len(hidden_states))
        with self._base_model_as(lambda *args, **kwargs: output):
            return self.logits(no_tokens, no_tokens, 0)

    def calls_base_model(self, device: torch.device) -> bool:
        """Whether a submodule computes the hidden states and the head lies outside of it, tried on one token.

        Some models (OPT) call parts of the submodule directly.
        """
        base = self._model.base_model
        head = self._model.get_output_embeddings()
        if base is self._model or any(module is head for module in modules_of(base)):
            return False

        def stop(*args: Any, **kwargs: Any) -> Any:
            raise _BaseModelOutput(None)

        position = torch.zeros(1, 1, dtype=torch.int64, device=device)
        try:
            with self._base_model_as(stop):
                self.logits(position, position, 0)
        except _BaseModelOutput:
            return True
        return False

    @contextmanager
    def _base_model_as(self, call: Callable[..., Any]) -> Iterator[None]:
        """Replace the base model's call."""
        num_changes = len(self._patches)
        self._patches.apply([(vars(self._model.base_model), "_compiled_call_impl", call)])
        try:
            yield
        finally:
            self._patches.undo(down_to=num_changes)


def split_passes(binding: ModelBinding) -> None:
    """Let a binding compute hidden states apart from logits, if its model does."""
    binding.passes = passes = ForwardPasses(binding.model, binding.patches, binding.vocab_size)
    with binding.probing(PassProbe()):
        passes.has_base_model = passes.calls_base_model(binding.device)


def head_step(binding: ModelBinding, hidden_states: Tensor) -> Tensor:
    """Logits [num_samples, vocab_size] of hidden states [num_samples, hidden_size]."""
    with binding.installed():
        logits: Tensor = binding.passes.head(hidden_states)
        return logits
