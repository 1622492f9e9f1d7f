"""Prompts in, text out: input processing, requests and their samples, detokenization. No torch."""
