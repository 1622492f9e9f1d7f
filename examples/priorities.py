"""Urgent requests overtake waiting ones; ageing prevents starvation; a timeout bounds a request."""

from nanovllm import LLM, SamplingParams

JOBS = [("a report", 5), ("another report", 5), ("a chat", 0), ("an alarm", -10)]


def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM("smollm2-135m-instruct", max_num_seqs=1, priority_ageing_s=60.0, max_queue=100) as llm:
        prompts = [f"Write {name}:" for name, _ in JOBS]
        priorities = [priority for _, priority in JOBS]
        outputs = llm.generate(prompts, params, priority=priorities, timeout=30.0, use_tqdm=False)
        for (name, priority), output in zip(JOBS, outputs, strict=True):
            metrics, reason = output.metrics, output.outputs[0].finish_reason
            print(f"{name:<15} priority {priority:>3}: waited {metrics.queue_time:.3f} s, ended by {reason}")


if __name__ == "__main__":
    main()
