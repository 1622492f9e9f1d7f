"""Several samples of one prompt: the prompt is computed once, each sample has its own noise."""

from nanovllm import LLM, SamplingParams


def main() -> None:
    params = SamplingParams(n=4, temperature=0.9, top_p=0.95, max_tokens=24, seed=1)
    with LLM("smollm2-135m-instruct") as llm:
        (output,) = llm.generate("Once upon a time, in a town by the sea,", params)
        for completion in output.outputs:
            print(f"{completion.index}: {completion.text!r} ({completion.finish_reason})")


if __name__ == "__main__":
    main()
