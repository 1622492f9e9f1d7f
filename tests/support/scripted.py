"""Answers that a test writes: the sampler's draws are replaced, all else of the engine and the server is as ever."""

import itertools
from dataclasses import replace

import torch

from tests.support.async_llms import in_engine_steps
from tests.support.tiny_models import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

END = "<|end|>"
TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}{% endif %}" + CHAT_TEMPLATE
)
# Thought that the template leaves open, unless it is told not to; earlier thought is shown.
THINKING_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}{% endif %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }} {% endif %}"
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif not waits %}<think>\n{% endif %}{% endif %}"
)


def thinking_tokenizer(template=THINKING_TEMPLATE):
    """A tiny tokenizer whose template knows tools and thought."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def ending_model():
    """A tiny model whose answers end with END."""
    return tiny_model(eos_token_id=tiny_tokenizer().convert_tokens_to_ids(END))


def prompt_of(running, monkeypatch):
    """The prompts that the engine gets from now on, as text."""
    prompts = []
    chat = running.engine._input_processor.parts.chat
    apply = chat.apply_to

    def noted(*args, **options):
        ids = apply(*args, **options)
        prompts.append(running.engine.tokenizer.decode(ids))
        return ids

    monkeypatch.setattr(chat, "apply_to", noted)
    return prompts


def says(running, monkeypatch, text):
    """Make each answer of a server this text, and END behind it; returns the id of END."""
    runner = running.engine._engine_thread._engine.model_runner
    execute = runner.execute
    tokenizer = running.engine.tokenizer
    end_id = tokenizer.convert_tokens_to_ids(END)
    token_ids = [*tokenizer(text)["input_ids"], end_id]

    def scripted(batch):
        said = [token_ids[min(sequence.num_output_tokens, len(token_ids) - 1)] for sequence in batch.sampling]
        return replace(execute(batch), token_ids=torch.tensor(said))

    monkeypatch.setattr(runner, "execute", scripted)
    return end_id


def fails_after(running, monkeypatch, steps):
    """Let the steps of a server fail, from the one behind so many on."""
    left = iter(range(steps))

    def fail(_):
        if next(left, None) is None:
            raise RuntimeError("broken")

    in_engine_steps(running.engine, monkeypatch, fail)


def without_repeats(kinds):
    """Kinds of events, each run of equal ones once."""
    return [kind for kind, _ in itertools.groupby(kinds)]
