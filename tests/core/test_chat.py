"""`LLM.chat`: its arguments, the messages that it takes, and the tokens that end its answers."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, GenerationConfig

from nanovllm import LLM
from nanovllm.features.chat.plain_messages import plain_messages
from nanovllm.features.chat.template_messages import TemplateMessages
from nanovllm.features.chat.turn_end import added_ids, turn_end
from tests.support.llms import OPTIONS, generate, greedy
from tests.support.template_families import FAMILIES
from tests.support.tiny_models import VOCAB_SIZE, save_tiny, tiny_model, tiny_tokenizer

ASK = [{"role": "user", "content": "Hello"}]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }};"
    "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
ONE = greedy(1)
FOUR = greedy(4)


@pytest.fixture(scope="module")
def llm():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    with LLM(tiny_model(), tokenizer=tokenizer, **OPTIONS) as llm:
        yield llm


def prompt(llm, messages=ASK, **arguments):
    (output,) = llm.chat(messages, ONE, use_tqdm=False, **arguments)
    return llm.tokenizer.decode(output.prompt_token_ids)


@pytest.mark.parametrize("arguments, shown", [
    ({}, "user: Hello;A:"),
    ({"tools": [TOOL]}, "weather;user: Hello;A:"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "False;user: Hello;A:"),
    ({"chat_template": "{{ messages[0].content }}!"}, "Hello!"),
    ({"add_generation_prompt": False}, "user: Hello;"),
    ({"add_generation_prompt": False, "continue_final_message": True}, "user: Hello"),
])  # fmt: skip
def test_arguments_reach_the_template(llm, arguments, shown):
    assert prompt(llm, **arguments) == shown
    assert llm.tokenizer.decode(llm.apply_chat_template(ASK, **arguments)[0]) == shown


def test_arguments_without_effect_are_refused(llm):
    for arguments, words in (
        ({"continue_final_message": True}, "add_generation_prompt=False"),
        ({"chat_template_kwargs": {"tokenize": False}}, "'tokenize'"),
        ({"chat_template": "{{ raise_exception('not today') }}"}, "not today"),
    ):
        with pytest.raises(ValueError, match=words):
            llm.chat(ASK, ONE, use_tqdm=False, **arguments)


def test_conversations_may_come_from_a_generator_and_keep_their_order(llm):
    contents = ("one", "two", "three")
    outputs = llm.chat(([{"role": "user", "content": content}] for content in contents), ONE, use_tqdm=False)
    texts = [llm.tokenizer.decode(output.prompt_token_ids) for output in outputs]
    assert texts == [f"user: {content};A:" for content in contents]


@pytest.mark.parametrize("message, shown", [
    ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}, "user: a\nb;"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
     'assistant: {"name": "f", "arguments": {"x": 1}};'),
    ({"role": "assistant", "content": None, "refusal": "no"}, "assistant: no;"),
    ({"role": "developer", "content": "be kind"}, "system: be kind;"),
])  # fmt: skip
def test_messages_may_have_every_spelling(llm, message, shown):
    assert prompt(llm, [*ASK, message]) == f"user: Hello;{shown}A:"


@pytest.mark.parametrize("message, words", [
    ({"role": "user", "content": 3}, r"messages\[1\].content must be a string or a list"),
    ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[1\].content\[0\]: .* data URL"),
    ({"role": "assistant", "tool_calls": [{"id": "a"}]}, r"messages\[1\].tool_calls\[0\]"),
    ({"role": "user"}, "a conversation is a list of"),
])  # fmt: skip
def test_messages_that_are_none_are_refused_by_place(llm, message, words):
    with pytest.raises(ValueError, match=words):
        llm.chat([*ASK, message], ONE, use_tqdm=False)


@pytest.mark.parametrize("content_format, shown", [("auto", "plain"), ("string", "plain"), ("parts", "parts")])
def test_the_form_of_content_can_be_set(content_format, shown):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ 'plain' if messages[0].content is string else 'parts' }}{% if 0 %}{{ messages }}{% endif %}"
    )
    with LLM(tiny_model(), tokenizer=tokenizer, chat_template_content_format=content_format, **OPTIONS) as llm:
        assert prompt(llm) == shown


# ------------------------------------------------------------------------------------------------------ end of turn


def says(llm, ids, monkeypatch):
    """Make each answer of an LLM these token ids."""
    runner = llm._engine.model_runner
    execute = runner.execute

    def scripted(batch):
        return replace(execute(batch), token_ids=torch.tensor([ids[s.num_output_tokens] for s in batch.sampling]))

    monkeypatch.setattr(runner, "execute", scripted)


@pytest.fixture
def ended(tmp_path):
    """A model whose generation config names 7, its config 8, its tokenizer <|system|>, its template <|end|>."""
    model = tiny_model(eos_token_id=8)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(tokenizer.convert_ids_to_tokens(8), special=True)])
    tokenizer.eos_token = "<|system|>"
    model.generation_config = GenerationConfig(eos_token_id=[7])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def test_answers_end_at_each_token_that_config_tokenizer_or_template_names(ended, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "nanovllm")
    params = greedy(5)
    with LLM(ended, **OPTIONS) as llm:
        system, end = llm.tokenizer.convert_tokens_to_ids(["<|system|>", "<|end|>"])
        eos = llm._engine.input_processor.limits.eos_token_ids
        assert set(eos) == {7, 8, system}
        for token_id in (7, 8, system, end):
            says(llm, [20, token_id, 21, 22, 23, 24], monkeypatch)
            is_end = token_id != end
            (raw,) = generate(llm, [[5, 6]], params)
            assert (raw.outputs[0].finish_reason == "stop") is is_end
            prompts = llm.apply_chat_template(ASK)
            for output in (
                *llm.chat(ASK, params, use_tqdm=False),
                *generate(llm, prompts, params),
                *generate(llm, prompts[0], params),
                [*llm.stream(prompts[0], params)][-1],
            ):
                assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("stop", [20, token_id])
                assert output.outputs[0].stop_reason == token_id
            (on,) = llm.chat(ASK, replace(params, ignore_eos=True), use_tqdm=False)
            assert on.outputs[0].token_ids == [20, token_id, 21, 22, 23]
            monkeypatch.undo()
    shown = caplog.text
    assert all(f"{token_id} " in shown for token_id in (7, 8, system, end)) and "answers of chats end at" in shown


@pytest.mark.parametrize("streamed", [False, True])
def test_the_end_of_a_turn_is_no_text_where_it_is_no_special_token(monkeypatch, streamed):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    end = VOCAB_SIZE - 1
    spelling = tokenizer.convert_ids_to_tokens(end)
    tokenizer.add_tokens([AddedToken(spelling, special=False)])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + spelling + "{% endfor %}"
    with LLM(tiny_model(), tokenizer=tokenizer, **OPTIONS) as llm:
        says(llm, [20, 21, end, 22], monkeypatch)
        (ids,) = llm.apply_chat_template(ASK)
        outputs = [*llm.stream(ids, FOUR)] if streamed else generate(llm, ids, FOUR)
        assert outputs[-1].outputs[0].token_ids == [20, 21, end]
        assert outputs[-1].outputs[0].text == llm.tokenizer.decode([20, 21])
        assert all(not output.outputs[0].text.endswith(spelling) for output in outputs)


def test_min_tokens_forbids_every_end(ended):
    with LLM(ended, **OPTIONS) as llm:
        ends = {7, 8, *llm.tokenizer.convert_tokens_to_ids(["<|system|>", "<|end|>"])}
        bias = dict.fromkeys(ends, 100.0)
        params = greedy(6, min_tokens=4, logit_bias=bias)
        (output,) = llm.chat(ASK, params, use_tqdm=False)
        assert not ends & set(output.outputs[0].token_ids[:4]) and output.outputs[0].token_ids[4] in ends


def test_a_cut_chat_that_is_resumed_ends_with_its_turn(ended, monkeypatch):
    params = greedy(1)
    with LLM(ended, **OPTIONS) as llm:
        end = llm.tokenizer.convert_tokens_to_ids("<|end|>")
        says(llm, [20, end, 21, 22], monkeypatch)
        (cut,) = llm.chat(ASK, params, use_tqdm=False)
        *_, whole = llm.resume(cut, replace(params, max_tokens=3))
        assert (whole.outputs[0].finish_reason, whole.outputs[0].token_ids) == ("stop", [20, end])


def test_transformers_ends_at_the_same_tokens(ended):
    """Greedy answers to raw prompts, where the library is given the same list."""
    with LLM(ended, **OPTIONS) as llm:
        eos = list(llm._engine.input_processor.limits.eos_token_ids)
        outputs = generate(llm, [[number] for number in range(30, 50)], replace(ONE, max_tokens=20))
    module = AutoModelForCausalLM.from_pretrained(ended)
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        expected = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=eos,
            pad_token_id=0,
        )
        assert output.outputs[0].token_ids == expected[0, 1:].tolist()


@pytest.mark.full
def test_replicas_end_chats_at_the_same_token(tmp_path):
    folder = save_tiny(tmp_path / "model")
    end = tiny_tokenizer().convert_tokens_to_ids("<|end|>")
    params = greedy(3, logit_bias={end: 100.0})
    with LLM(str(folder), data_parallel_size=2, **OPTIONS) as llm:
        (chat,) = llm.chat(ASK, params, use_tqdm=False)
        (raw,) = generate(llm, [[5, 6]], params)
    assert chat.outputs[0].token_ids == [end] and raw.outputs[0].token_ids == [end] * 3


HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}{% for c in m.tool_calls or [] %}<|start|>assistant to={{ c.function.name }}"
    "<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}{% if not m.tool_calls %}"
    "<|start|>assistant<|channel|>"
    "final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ENDS = {
    "chatml": FAMILIES["chatml"],
    "hermes": FAMILIES["hermes"],
    "space": "{% for m in messages %}[{{ m.content }}{% if m.role == 'assistant' %} <|end|>{% endif %}{% endfor %}",
    "two": FAMILIES["chatml"].replace("<|end|>", "<|end|>\n<|call|>"),
}
NO_ENDS = {
    "none": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "parts": FAMILIES["chatml"].replace(
        "{{ '' + m.content }}", "{{ m.thinking }}<|end|><|assistant|>{{ '' + m.content }}"
    ),
    "calls": FAMILIES["hermes"].replace("<tool_call>", "<|end|><tool_call>"),
    "refuses": "{{ raise_exception('no') }}",
    "text": FAMILIES["chatml"].replace("<|end|>", "###"),
}


def end_of(template):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_tokens(
        [AddedToken(f"<|{name}|>", special=True) for name in ("start", "channel", "message", "call", "return")]
    )
    tokenizer.chat_template = template

    def render(messages, begins_answer):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begins_answer)

    return tuple(map(tokenizer.convert_ids_to_tokens, turn_end(added_ids(tokenizer), render)))


@pytest.mark.parametrize("name", ENDS)
def test_the_token_behind_the_last_answer_ends_a_turn(name):
    assert end_of(ENDS[name]) == ("<|end|>",)


@pytest.mark.parametrize("name", NO_ENDS)
def test_a_token_that_stands_within_answers_ends_no_turn(name):
    assert end_of(NO_ENDS[name]) == ()


def test_the_longest_token_behind_an_answer_ends_its_turn():
    def render(messages, begins_answer):
        return (
            "".join(f"{each['role']}: {each['content']}<|end|>>" for each in messages) + "assistant: " * begins_answer
        )

    assert turn_end({"<|end|>": 1, "<|end|>>": 2}, render) == (2,)


def test_the_end_of_a_channel_or_a_call_ends_no_turn_of_harmony():
    assert end_of(HARMONY) == ("<|return|>",)


# ------------------------------------------------------------------------------------------------------------- messages


def new_call(call_id, name):
    return {"id": call_id, "function": {"name": name, "arguments": "{}"}}


CALLS = {"role": "assistant", "tool_calls": [new_call("a", "f"), new_call("b", "g"), new_call("c", "f")]}
RESULTS = [{"role": "tool", "content": "1"} | more for more in ({"tool_call_id": "b"}, {"name": "f"}, {})]


def test_each_result_has_id_and_name_of_its_call_by_what_it_names_and_else_by_order():
    _, *results = plain_messages([CALLS, *RESULTS])
    assert [(result["tool_call_id"], result["name"]) for result in results] == [("b", "g"), ("a", "f"), ("c", "f")]


def test_thought_has_each_name_that_templates_read():
    (message,) = plain_messages([{"role": "assistant", "content": "x", "thinking": "why"}])
    assert [message[name] for name in ("reasoning_content", "reasoning", "thinking")] == ["why"] * 3


class Trials:
    """What a template does and reads: what is named, and nothing else."""

    def __init__(self, *true):
        self._true = true

    def __getattr__(self, name):
        return lambda *_: name in self._true


def test_a_template_without_late_system_messages_gets_their_text_elsewhere():
    late = [*plain_messages(ASK), {"role": "system", "content": "Obey."}]
    messages, _ = TemplateMessages(Trials("drops_late_system")).shaped(late, None)
    assert "system" not in [message["role"] for message in messages[1:]] and "Obey." in str(messages)


def test_tools_of_the_system_message_are_not_given_twice():
    messages, tools = TemplateMessages(Trials("reads_tools_of_system")).shaped(plain_messages(ASK), [TOOL])
    assert (messages[0]["tools"], tools) == ([TOOL], None)


def test_results_follow_the_ids_of_calls_that_name_their_function():
    calls, *results = TemplateMessages(Trials("reads", "names_in_ids")).finished(plain_messages([CALLS, *RESULTS]))
    assert [call["id"] for call in calls["tool_calls"]] == ["functions.f:0", "functions.g:1", "functions.f:2"]
    assert [result["tool_call_id"] for result in results] == ["functions.g:1", "functions.f:0", "functions.f:2"]
