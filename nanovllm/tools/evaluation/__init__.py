"""Evaluation harnesses on the engine."""
