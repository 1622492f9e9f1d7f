"""Speculative decoding: drafts of coming tokens, verified by the model in one step; outputs stay the same."""
