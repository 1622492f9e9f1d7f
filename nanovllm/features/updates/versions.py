"""Labels of an engine's weights, and the runs of output tokens that each of them drew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nanovllm.outputs import RequestOutput

Run = tuple[int, str | None]  # index of its first token in the sample's output, label of the weights
MAX_LENGTH = 256


class WeightRuns:
    """Runs of a request's samples; all requests since an update share one until the next update.

    Args:
        label: label of the weights that draw the first token, or the first one after a resumption.
        runs: runs of samples that have seen an update, by index.
    """

    def __init__(self, label: str | None, runs: dict[int, list[Run]]) -> None:
        self.label = label
        self._runs = runs

    def of(self, sample: Any) -> list[Run]:
        """The runs of a sample; the last one begins with its next token, if none has come yet."""
        resumed = sample.request.resumed
        if (runs := self._runs.get(sample.sequence.index)) is not None:
            return runs
        if resumed is None:
            return [(0, self.label)]
        before = resumed.samples[sample.sequence.index]
        drawn = before.weight_versions or [(0, None)]
        return drawn if drawn[-1][1] == self.label else _followed(drawn, len(before.token_ids), self.label)

    def report(self, samples: Iterable[Any], outputs: Iterable[RequestOutput]) -> None:
        """Set the runs of each sample's new output: those with tokens in it."""
        for sample, output in zip(samples, outputs, strict=True):
            (completion,) = output.outputs
            num_tokens = len(completion.token_ids)
            first = max(0, sample.num_shown_tokens - num_tokens)  # only deltas begin later than token 0
            runs = self.of(sample)
            ends = [start for start, _ in runs[1:]] + [first + num_tokens]
            completion.weight_versions = [
                run for run, end in zip(runs, ends, strict=True) if end > first and run[0] < first + num_tokens
            ]


def check_label(version: Any) -> None:
    """Raise TypeError or ValueError for a label that is neither None nor a string of at most MAX_LENGTH characters."""
    if version is not None and not isinstance(version, str):
        raise TypeError(f"version must be a string or None, not {version!r}.")
    if version is not None and len(version) > MAX_LENGTH:
        raise ValueError(f"version has {len(version)} characters; at most {MAX_LENGTH} are kept. Shorten it.")


def begin(engine: Any, version: str | None) -> None:
    """Note that new weights draw all tokens from now on; nothing may be in flight."""
    for request in engine.requests.values():
        before = request.weight_runs or WeightRuns(None, {})
        request.weight_runs = WeightRuns(
            version,
            {
                sample.sequence.index: _followed(before.of(sample), sample.sequence.num_output_tokens, version)
                for sample in request.samples
            },
        )
    engine.input_processor.weight_runs = WeightRuns(version, {})


def weights_version(engine: Any) -> str | None:
    """The label of the last update; None without one."""
    if hasattr(engine, "updates"):  # a pool
        label: str | None = engine.updates.version
        return label
    runs = getattr(engine.input_processor, "weight_runs", None)
    return None if runs is None else runs.label


def _followed(runs: Iterable[Run], start: int, label: str | None) -> list[Run]:
    """Runs with another one from token `start` on, in the place of those without tokens."""
    return [*(run for run in runs if run[0] < start), (start, label)]
