"""Fill in the middle: prompts for the text between a prefix and a suffix."""

NEEDS = ("features.intake",)
