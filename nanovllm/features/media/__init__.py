"""Pictures in prompts: their identity, their features, and the steps that compute their rows."""

NEEDS = ("features.extras", "features.intake", "models")
