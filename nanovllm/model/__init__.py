"""The `transformers` module: loaded, probed, hooked and sped up."""
