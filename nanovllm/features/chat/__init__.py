"""Conversations: chat templates, messages in one spelling, and tokens of control that no text can spell."""

NEEDS = ("features.engine_config", "features.intake", "features.option_checks", "features.sampling_params")
