"""Sequences and resolved configs of the engine's own tests, with the public classes of options."""

from functools import partial

from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.sampling_params import SamplingParams
from tests.engine import blocks, loops

make_sequence = partial(blocks.make_sequence, params_class=SamplingParams)
make_config = partial(loops.make_config, config_class=EngineConfig)
