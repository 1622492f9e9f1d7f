"""An own policy: of the requests that may be preempted, the one that loses the least work goes first.

`nanovllm serve --policy examples.least_progress_first:LeastProgressFirst` serves with it, in the folder above.
"""

from nanovllm import EngineConfig
from nanovllm.features.costs.cost_model import CostModel, DeviceCost, HostCost
from nanovllm.scheduler import WaitingQueue
from nanovllm.testing import check_policy
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.specs import build

WIDTH, SHADES = 60, " .:-=#"


class LeastProgressFirst(WaitingQueue):
    """Preempts the sequence with the fewest computed tokens, where the engine's own queue preempts the youngest."""

    def victims(self, running, sequence):
        """Only sequences younger than the one that lacks blocks, so that the oldest always finishes."""
        younger = super().victims(running, sequence)
        return sorted(younger, key=lambda victim: (-victim.priority, victim.num_computed_tokens))


def draw(name: str, policies: dict[str, type] | None) -> None:
    """Simulate prompts of all lengths in a scarce KV cache, and draw when the steps compute prompts, again or not."""
    config = EngineConfig(
        max_model_len=2048, max_num_batched_tokens=512, max_num_seqs=32, block_size=16, num_kv_blocks=400,
        long_prefill_token_threshold=256, max_num_partial_prefills=4, max_long_partial_prefills=1, overlap=False,
        policies=policies,
    )  # fmt: skip
    device = DeviceCost(fixed=2e-3, per_token_below=1e-4, per_token_above=1e-4, knee=64)
    workload = build("random:requests=64,prompt=20-1500,output=20-600")
    simulation = simulate(workload, config, CostModel(HostCost(), device, HostCost()), keep_steps=True)
    counts = [0] * WIDTH
    for record in simulation.steps[0]:
        counts[int(record.time / 15 * WIDTH)] += record.num_prefill_tokens
    figures = simulation.figures()
    again = sum(counts) - figures["num_prompt_tokens"] + figures["cached_tokens"]
    print(f"{name:<21}|{''.join(SHADES[min(5, -(-count // 500))] for count in counts)}|")
    print(f"  {figures['preemptions']} preemptions, {again:,} tokens computed again, {figures['seconds']:.1f} s")


def main() -> None:
    check_policy(LeastProgressFirst, num_walks=10)
    print("LeastProgressFirst keeps every invariant of the scheduler")
    draw("youngest first", None)
    draw("least progress first", {"queue": LeastProgressFirst})


if __name__ == "__main__":
    main()
