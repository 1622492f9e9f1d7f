"""K and V in 8-bit floats, with a scale for each token and head: half of the bytes of bfloat16."""

NEEDS = ("features.engine_config", "features.extras", "features.option_checks")
