"""Quantised weights: their block formats, and quantisation on load."""
