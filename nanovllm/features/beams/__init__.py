"""Beam search: beams are running sequences that continue from the KV of the beams they extend."""

NEEDS = ("features.intake", "features.interrupts", "features.refusals", "features.sampling_params")
