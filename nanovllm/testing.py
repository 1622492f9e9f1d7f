"""For tests of one's own parts: `check_policy` runs the shipped fuzz on a queue or a budget. Needs no torch."""

from nanovllm.features.policies.walk import check_policy

__all__ = ["check_policy"]
