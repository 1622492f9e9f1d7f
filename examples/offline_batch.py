"""Complete a batch of prompts: text and token ids mixed, each with its own sampling parameters."""

from nanovllm import LLM, SamplingParams


def main() -> None:
    with LLM("smollm2-135m-instruct") as llm:
        prompts = ["The capital of France is", "Once upon a time", llm.tokenizer("2 + 3 =")["input_ids"]]
        params = [
            SamplingParams(temperature=0.0, max_tokens=16),
            SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=1),
            SamplingParams(temperature=0.0, max_tokens=8, stop="\n"),
        ]
        for output in llm.generate(prompts, params):
            completion = output.outputs[0]
            print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")


if __name__ == "__main__":
    main()
