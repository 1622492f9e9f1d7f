"""Log-probabilities of an answer, token by token, and of a given text."""

import math

from nanovllm import LLM, SamplingParams


def main() -> None:
    with LLM("smollm2-135m-instruct") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
        (output,) = llm.generate("The capital of France is", params)
        completion = output.outputs[0]
        for token_id, report in zip(completion.token_ids, completion.logprobs, strict=True):
            shares = {llm.tokenizer.decode([other]): round(math.exp(p.logprob), 3) for other, p in report.items()}
            print(f"{llm.tokenizer.decode([token_id])!r} of {shares}")

        texts = ["The capital of France is Paris.", "The capital of France is Lyon."]
        for output in llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)):
            tokens = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            print(f"{sum(report[token_id].logprob for token_id, report in tokens):.2f} {output.prompt!r}")


if __name__ == "__main__":
    main()
