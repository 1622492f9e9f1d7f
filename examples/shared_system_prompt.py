"""Requests that share a system prompt: its whole blocks are computed once, in the step that first needs them."""

from nanovllm import LLM, SamplingParams

SYSTEM = "You answer questions about cities in one short sentence. " * 20
CITIES = ["Paris", "Rome", "Madrid", "Berlin", "Vienna", "Lisbon", "Athens", "Dublin"]


def main() -> None:
    conversations = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Which country is {city} in?"}]
        for city in CITIES
    ]
    with LLM("smollm2-135m-instruct") as llm:
        outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=24))
        for city, output in zip(CITIES, outputs, strict=True):
            print(f"{city}: {output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens from the cache")
            print(f"    {output.outputs[0].text}")
        stats = llm.stats()
        print(f"{stats.prefix_cache_hits} of {stats.prefix_cache_queries} prompt tokens were found in the prefix cache")


if __name__ == "__main__":
    main()
