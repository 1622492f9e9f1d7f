"""Models: found, fetched, checked, loaded, quantised; GGUF; refusals by name."""
