"""Small workloads of each kind, and a digest of a workload's requests."""

import hashlib
import json

SMALL = [
    "random:requests=5,prompt=3-9", "P1:scale=0.02", "chat:scale=0.1", "whales:scale=0.05",
    *(f"{name}:requests=40,scale=0.1" for name in ("azure-conv", "azure-code", "mooncake")),
]  # fmt: skip


def digest(workload):
    requests = [(r.arrival, r.prompt_token_ids, r.num_output_tokens, r.after) for r in workload.requests]
    return hashlib.sha256(json.dumps(requests).encode()).hexdigest()
