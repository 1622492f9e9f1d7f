"""Grammars of whole answers under llguidance itself: what they accept, random texts of them, what is read in these."""

import functools

import llguidance
import llguidance.hf

from nanovllm.serving.server.answers.answer_format import AnswerFormat
from nanovllm.serving.server.answers.grammar import build_form
from nanovllm.serving.server.answers.reasoning import REASONING_FORMATS
from nanovllm.serving.server.answers.tool_calls import FORMATS
from tests.support.tiny_models import tiny_tokenizer

# Markers that are plain tokens of a tokenizer, and those that are special ones.
PLAIN = """
    <think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <seed:tool_call>
    </seed:tool_call> ◁think▷ ◁/think▷ <minimax:tool_call> </minimax:tool_call>
"""
SPECIAL = """
    [TOOL_CALLS] <|channel|> <|message|> <|constrain|> <|start|> <|call|> <|return|> <|START_ACTION|> <|END_ACTION|>
    <|tool_call> <tool_call|> <|"|> <|channel> <channel|> ｜DSML｜ <|tool_calls_section_begin|>
    <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>
    <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜>
"""


@functools.cache
def setting_of(tools, reasoning="none", *, as_tokens=True):
    return Setting(tools, reasoning, as_tokens=as_tokens)


class Setting:
    """A tokenizer with the markers of a format, as tokens or as text, and llguidance's view of it."""

    def __init__(self, tools, reasoning="none", *, as_tokens=True):
        self.tokenizer = tiny_tokenizer(eos_token="<|system|>")
        if as_tokens:
            special = SPECIAL.split()
            if tools == "mistral_args":
                special += ["[ARGS]", "[CALL_ID]"]
            self.tokenizer.add_tokens(PLAIN.split())
            self.tokenizer.add_special_tokens({"additional_special_tokens": special})
        self.form = AnswerFormat(
            REASONING_FORMATS[reasoning], FORMATS[tools.removesuffix("_args")], frozenset(["[TOOL_CALLS]", "[ARGS]"])
        )
        closing = {"seed": "</parameter>", "glm": "</arg_value>", "gemma4": '<|"|>', "minimax_m2": "</parameter>"}
        closing |= dict.fromkeys(("deepseek_v32", "deepseek_v4"), "</｜DSML｜parameter>")
        self.closing = self.tokenizer(closing.get(tools, ""))["input_ids"]
        self.guide = llguidance.hf.from_tokenizer(self.tokenizer)
        self.end_id = self.tokenizer.convert_tokens_to_ids("<|system|>")

    def matcher(self, constraints, is_open):
        built = build_form(constraints, self.form, self.tokenizer, is_open=is_open)
        grammar = built.grammar or f"start: %json {built.json_schema}"
        matcher = llguidance.LLMatcher(self.guide, grammar)
        assert not matcher.is_error(), (matcher.get_error(), grammar)
        return matcher

    def accepts(self, constraints, text, *, is_open=False):
        matcher = self.matcher(constraints, is_open)
        ids = self.tokenizer(text)["input_ids"]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def generate(self, constraints, chance, *, is_open=False, limit=2000):
        """A random text of the grammar; None if it has not ended within the limit."""
        matcher, ids = self.matcher(constraints, is_open), []
        hasty = {*self.tokenizer('"}]<\n')["input_ids"], *range(512, len(self.tokenizer))}
        while len(ids) < limit:
            # The end of a free text, which chance would hardly spell.
            if self.closing and chance.random() < 0.03 and matcher.validate_tokens(self.closing) == len(self.closing):
                assert matcher.consume_tokens(self.closing)
                ids += self.closing
                continue
            allowed = [token_id for token_id, bias in enumerate(matcher.compute_logit_bias()) if bias]
            if self.end_id in allowed and chance.random() < 0.9:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            likely = [token_id for token_id in allowed if token_id in hasty]
            chosen = chance.choice(likely if likely and chance.random() < 0.4 else allowed)
            if chosen == self.end_id:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            assert matcher.consume_token(chosen)
            ids.append(chosen)
            if matcher.is_stopped():
                return self.tokenizer.decode(ids, skip_special_tokens=False)
        return None

    def read(self, text, schemas, *, is_open=False):
        return self.form.stream(schemas, is_open=is_open).add(text, is_last=True)
