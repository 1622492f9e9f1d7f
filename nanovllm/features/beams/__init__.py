"""Beam search: beams are running sequences that go on from the KV of the beams they extend."""

NEEDS = ("features.interrupts", "features.refusals", "features.sampling_params")
