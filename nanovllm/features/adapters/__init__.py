"""Adapters: LoRA factors that requests name, added to the products of their rows."""

NEEDS = ("features.refusals",)
