"""Concurrent clients of one engine: streamed answers, and a request that ends when its client leaves."""

import asyncio

from nanovllm import AsyncLLM, SamplingParams

QUESTIONS = ["What is the capital of France?", "Name three colours.", "Count from one to a thousand, in words."]


async def ask(llm: AsyncLLM, question: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=256)
    text = ""
    async for output in llm.chat([{"role": "user", "content": question}], params, output_kind="delta"):
        text += output.outputs[0].text
        if len(text) > 200:
            print(f"{question} -> {text!r} ... that is enough")
            return  # leaving the loop aborts the request
    print(f"{question} -> {text!r} (first token after {output.metrics.ttft:.2f} s)")


async def main() -> None:
    async with AsyncLLM("smollm2-135m-instruct") as llm:
        await asyncio.gather(*(ask(llm, question) for question in QUESTIONS))
        print(f"{(await llm.stats()).num_steps} steps served them all")


if __name__ == "__main__":
    asyncio.run(main())
