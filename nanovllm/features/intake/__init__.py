"""Work ahead of the queue, such as tokenising and compiling, fairly among clients."""

NEEDS = ("features.sampling_params",)
