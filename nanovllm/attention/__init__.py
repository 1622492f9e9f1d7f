"""How a step's rows see the KV cache, one file a backend."""
