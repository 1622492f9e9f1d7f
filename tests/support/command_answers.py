"""What the command line is to answer, by the tiny model and its tokenizer."""

from nanovllm import LLM, SamplingParams
from tests.support.tiny_models import save_tiny, tiny_tokenizer


def encoded(text):
    return tiny_tokenizer()(text)["input_ids"]


def decoded(token_ids):
    return tiny_tokenizer().decode(token_ids, skip_special_tokens=True)


def generated(folder, prompt, **params):
    """Return the token ids of the same request through `LLM`."""
    options = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 65, "max_model_len": 256}
    with LLM(folder, **options) as llm:
        params = {"temperature": 0.0, "max_tokens": 6} | params
        return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0].token_ids


def save_with_template(folder, chat_template):
    """Save the tiny model with another chat template, or without one; returns the folder as text."""
    save_tiny(folder, with_tokenizer=False)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return str(folder)
