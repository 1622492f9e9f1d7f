"""Formats of tool calls, by model family, and the chat templates that they are recognised by.

hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>                    Hermes, Qwen2.5, Qwen3
llama         {"name": ..., "parameters": {...}}; ";" between several                     Llama 3.1 and later
mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name{...}   Mistral
deepseek_v3   <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, a fenced object               DeepSeek V3, R1
deepseek_v31  <｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>               DeepSeek V3.1
kimi_k2       <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}        Kimi K2
cohere        <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>     Command R7B, Command A
gemma4        <|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>                       Gemma 4
qwen_xml      <tool_call><function=...><parameter=...>...</parameter></function>          Qwen3-Coder, Qwen3.5
seed          the same within <seed:tool_call>...</seed:tool_call>                        Seed-OSS
glm           <tool_call>name<arg_key>...</arg_key><arg_value>...</arg_value>             GLM-4.5 and later
minimax_m2    <minimax:tool_call><invoke name="..."><parameter name="...">...             MiniMax M2
deepseek_v32  <｜DSML｜function_calls><｜DSML｜invoke name="..."><｜DSML｜parameter ...        DeepSeek V3.2
deepseek_v4   the same within <｜DSML｜tool_calls>                                         DeepSeek V4
harmony       messages to functions.name; `harmony` reads them                            gpt-oss
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nanovllm.serving.server.answers.lenient_json import GEMMA_QUOTE
from nanovllm.serving.server.answers.tagged_calls import Tags

DSML = "｜DSML｜"  # one token in DeepSeek's tokenizers


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format of one model family.

    openers, closers: strings before calls and after them; each may be missing, or stand there several times.
    header: strings between a call's name and its arguments.
    bare: Text that may begin a call without an opener, at the start of the answer.
    tags: tags of calls that write each argument between tags.
    inner: further strings of a call that some tokenizers have as special tokens.
    """

    name: str
    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    tags: Tags | None = None
    inner: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings that start a call anywhere in the answer."""
        return self.openers + (() if self.tags is None else self.tags.starts)

    @property
    def strings(self) -> tuple[str, ...]:
        """All strings of a call that are no text."""
        tags = () if self.tags is None else self.tags.closings + self.tags.argument_starts
        return self.markers + self.closers + self.header + self.inner + tags


_FUNCTION = Tags(
    starts=("<function=",),
    call=re.compile(r"""<function=["']?([^>"'\n]+)["']?>"""),
    call_so_far=re.compile(r"""<function=["']?[\w.:/-]*["']?"""),
    argument=re.compile(r"""<parameter=["']?(?P<key>[^>"'\n]+)["']?>"""),
    argument_starts=("<parameter=",),
    closings=("</parameter>",),
    ends=("</function>",),
    trims=True,
)
_SEED_FUNCTION = Tags(
    starts=_FUNCTION.starts,
    call=_FUNCTION.call,
    call_so_far=_FUNCTION.call_so_far,
    argument=_FUNCTION.argument,
    argument_starts=_FUNCTION.argument_starts,
    closings=_FUNCTION.closings,
    ends=_FUNCTION.ends,
)
_ARGUMENT_PAIRS = Tags(
    starts=(),
    call=re.compile(r"\s*([\w.:/-]+)\s*(?=<arg_key>|</tool_call>|<tool_call>)"),
    call_so_far=re.compile(r"\s*[\w.:/-]*\s*(?:<[\w/]*)?"),
    argument=re.compile(r"<arg_key>(?P<key>[^<\n]+)(?:</arg_key>)?\s*<arg_value>"),
    argument_starts=("<arg_key>",),
    closings=("</arg_value>",),
    has_lines=False,
)
_INVOKE = Tags(
    starts=("<invoke name=",),
    call=re.compile(r"""<invoke name=["']?([^>"'\n]+)["']?>"""),
    call_so_far=re.compile(r"""<invoke name=["']?[\w.:/-]*["']?"""),
    argument=re.compile(r"""<parameter name=["']?(?P<key>[^>"'\n]+)["']?>"""),
    argument_starts=("<parameter name=",),
    closings=("</parameter>",),
    ends=("</invoke>",),
    takes_json=True,
)
_DSML_INVOKE = Tags(
    starts=(f"<{DSML}invoke name=", "<invoke name="),
    call=re.compile(rf"""<(?:{DSML})?invoke name=["']?([^>"'\n]+)["']?>"""),
    call_so_far=re.compile(rf"""<(?:{DSML})?invoke name=["']?[\w.:/-]*["']?"""),
    argument=re.compile(
        rf"""<(?:{DSML})?parameter name=["']?(?P<key>[^>"'\n]+)["']?(?:\s+string="(?P<kind>true|false)")?\s*>"""
    ),
    argument_starts=(f"<{DSML}parameter name=", "<parameter name="),
    closings=(f"</{DSML}parameter>", "</parameter>"),
    ends=(f"</{DSML}invoke>", "</invoke>"),
    has_lines=False,
    takes_json=True,
)


def _dsml(name: str, *blocks: str) -> ToolFormat:
    return ToolFormat(
        name,
        openers=tuple(f"<{prefix}{block}>" for block in blocks for prefix in (DSML, "")),
        closers=tuple(f"</{prefix}{block}>" for block in blocks for prefix in (DSML, "")),
        tags=_DSML_INVOKE,
        inner=(DSML,),
    )


def _deepseek(name: str) -> ToolFormat:
    return ToolFormat(
        name,
        openers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        closers=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        header=("<｜tool▁sep｜>",),
    )


HARMONY_TOOLS = ToolFormat("harmony")  # `harmony` reads these calls
_CALL_TAG = ("<tool_call>",)
_CALL_END = ("</tool_call>",)
_KNOWN = (
    ToolFormat("hermes", _CALL_TAG, _CALL_END, bare=("{", "```json"), tags=_FUNCTION),
    ToolFormat("llama", ("<|python_tag|>",), bare=("{", "[", "```json")),
    ToolFormat("mistral", ("[TOOL_CALLS]",), header=("[CALL_ID]", "[ARGS]")),
    _deepseek("deepseek_v3"),
    _deepseek("deepseek_v31"),
    ToolFormat(
        "kimi_k2",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        header=("<|tool_call_argument_begin|>",),
    ),
    ToolFormat("cohere", ("<|START_ACTION|>",), ("<|END_ACTION|>",)),
    ToolFormat("gemma4", ("<|tool_call>",), ("<tool_call|>",), inner=(GEMMA_QUOTE,)),
    ToolFormat("qwen_xml", _CALL_TAG, _CALL_END, tags=_FUNCTION),
    ToolFormat("seed", ("<seed:tool_call>",), ("</seed:tool_call>",), tags=_SEED_FUNCTION),
    ToolFormat("glm", _CALL_TAG, _CALL_END, tags=_ARGUMENT_PAIRS, inner=("</arg_key>", "<arg_value>")),
    ToolFormat("minimax_m2", ("<minimax:tool_call>",), ("</minimax:tool_call>",), tags=_INVOKE),
    _dsml("deepseek_v32", "function_calls", "tool_calls"),
    _dsml("deepseek_v4", "tool_calls", "function_calls"),
    HARMONY_TOOLS,
)
FORMATS: dict[str, ToolFormat | None] = {form.name: form for form in _KNOWN} | {"none": None}
# Texts that all occur in a format's templates; the first match counts. Some models share a tag with a format but write
# calls differently: Apriel's <tool_calls>, Functionary's JSON in <function=name>, Llama's Python.
_SIGNS = (
    (("<|channel|>",), "harmony"),
    (("<seed:tool_call>", "<parameter="), "seed"),
    (("<function=", "<parameter="), "qwen_xml"),
    (("<function=",), "none"),
    (("<arg_key>", "<tool_call>"), "glm"),
    (("<minimax:tool_call>", "<invoke name="), "minimax_m2"),
    ((DSML, "function_calls>"), "deepseek_v32"),
    ((DSML, "tool_calls"), "deepseek_v4"),
    (("<invoke name=",), "none"),
    (("<tool_calls>",), "none"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<|tool_call_begin|>",), "kimi_k2"),
    (("tool_declare<|im_middle|>",), "kimi_k2"),  # templates of its first release show no calls
    (("<|START_ACTION|>",), "cohere"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<tool_call>", "arguments"), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_tag|>", "parameters"), "llama"),
    (("Environment: ipython", "parameters"), "llama"),
)


def detect_format(template: str) -> str:
    """Name the tool call format of a chat template; "none" if it has no tools or an unsupported format."""
    return next((name for signs, name in _SIGNS if all(sign in template for sign in signs)), "none")
