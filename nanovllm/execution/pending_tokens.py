"""The handle of a launched step: its tokens, once they are on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.process.device import raise_device_error, to_host
from nanovllm.sampling.sampler import StepReport


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """A launched step's sampled tokens and log-probabilities, on their way to the host."""

    token_ids: Tensor  # [num_samples] int64, on the host
    report: StepReport | None  # None if nothing but tokens was asked for
    arrival: torch.cuda.Event | None  # None if they are there

    @classmethod
    def send(cls, token_ids: Any, report: StepReport | None) -> Any:
        """token_ids [num_samples] int64, which may be overwritten once a next step is launched."""
        if not isinstance(token_ids, Tensor):  # a `LateDraw`, which sends them itself
            return token_ids
        if token_ids.device.type == "cpu":
            return cls(token_ids, report, None)
        arrival = torch.cuda.Event()
        pending = cls(to_host(token_ids), report and report.to_host(), arrival)
        arrival.record(torch.cuda.current_stream(token_ids.device))
        return pending

    def result(self) -> list[int]:
        """Wait for the step and return its tokens in the order of `ScheduledBatch.sampling`; then `report` is there."""
        try:
            if self.arrival is not None:
                self.arrival.synchronize()
            return self.token_ids.tolist()
        except RuntimeError as error:
            raise_device_error(error)
