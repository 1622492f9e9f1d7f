"""Generate with a module in training: the engine uses its weights in place and restores the module after each call.

It sees what an optimizer writes, but no writes through `.data` (`p.data.mul_(0.9)`): call `llm.weights_changed()` then.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.models.default_model import ensure_default_model

TEXT = "The capital of France is Lyon."


def main() -> None:
    folder = ensure_default_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=2e-3)
    batch = tokenizer(TEXT, return_tensors="pt")

    params = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(model=model, tokenizer=tokenizer, max_model_len=512, enforce_eager=True) as llm:
        for step in range(4):
            output = llm.generate("The capital of France is", params, use_tqdm=False)
            print(f"after {step} training steps: {output[0].outputs[0].text!r}")
            loss = model(**batch, labels=batch["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
