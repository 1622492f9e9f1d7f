"""Tool calls as models write them: each format's own form, and the deviations that users of public engines report."""

import random
import re

import pytest

from nanovllm.serving.server.answers.answer_format import AnswerFormat
from nanovllm.serving.server.answers.call_formats import FORMATS
from nanovllm.serving.server.openai.responses_items import is_json
from tests.support.answer_cuts import cuts, loaded, read

TEXT = {"type": "string"}
TOOLS = {
    "read": {"type": "object", "properties": {"path": TEXT}, "required": ["path"]},
    "write": {"type": "object", "properties": {"path": TEXT, "content": TEXT, "mode": {"type": "integer"}}},
    "edit": {"type": "object", "properties": {"edits": {"type": "array"}, "options": {"type": "object"}}},
    "now": None,
}
READ = [("read", {"path": "/x"})]
WRITE = [("write", {"path": "/x", "content": "hello"})]
NOW = [("now", {})]
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KIMI, KIMI_ARGUMENTS, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_ALL, KIMI_ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
Q = '<|"|>'


def tag(inner):
    return f"<tool_call>{inner}</tool_call>"


def xml(*parts, name="write", begin="<tool_call>\n", end="</function>\n</tool_call>"):
    return f"{begin}<function={name}>\n{''.join(parts)}{end}"


PATH, BODY = "<parameter=path>\n/x\n</parameter>\n", "<parameter=content>\nhello\n</parameter>\n"
OPEN_PATH, OPEN_BODY = "<parameter=path>\n/x\n", "<parameter=content>\nhello\n"


def dsml(*parts, name="write", block="function_calls"):
    head = f'<｜DSML｜{block}>\n<｜DSML｜invoke name="{name}">\n'
    return f"{head}{''.join(parts)}</｜DSML｜invoke>\n</｜DSML｜{block}>"


DSML_PATH = '<｜DSML｜parameter name="path" string="true">/x</｜DSML｜parameter>\n'
DSML_BODY = '<｜DSML｜parameter name="content" string="true">hello</｜DSML｜parameter>\n'


def invoke(*parts, name="write"):
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{"".join(parts)}</invoke>\n</minimax:tool_call>'


INVOKE_PATH = '<parameter name="path">/x</parameter>\n'
INVOKE_BODY = '<parameter name="content">hello</parameter>\n'
PAIR_PATH = "<arg_key>path</arg_key>\n<arg_value>/x</arg_value>\n"
PAIR_BODY = "<arg_key>content</arg_key>\n<arg_value>hello</arg_value>\n"


def whole(form, calls, *texts):
    """Answers that are these calls and nothing else."""
    return [(form, text, "", calls) for text in texts]


def no_call(form, *texts):
    """Answers that stay text: arguments that are not certain, tools that are not there."""
    return [(form, text, text, []) for text in texts]


CALLS = [  # format, text, content, calls
    *whole("hermes", READ,
        *map(tag, (
            '{"name": "read", "parameters": {"path": "/x"}}',
            '{"name": "read", "args": {"path": "/x"}}',
            '{"name": "read", "input": {"path": "/x"}}',
            '{"type": "function", "function": {"name": "read", "arguments": {"path": "/x"}}}',
            '{"id": "c1", "type": "function", "function": {"name": "read", "parameters": {"path": "/x"}}}',
            '{"function": "read", "arguments": {"path": "/x"}}',
            '{"tool_name": "read", "arguments": {"path": "/x"}}',
            '{"arguments": {"path": "/x"}, "name": "read"}',
            '{"name": "read", "arguments": "{\\"path\\": \\"/x\\"}"}',
            '{"name": "read", "path": "/x"}',
            '{"name": "functions.read", "arguments": {"path": "/x"}}',
            '\n{"name": "read", "arguments": {"path": "/x"}}}\n',
            '\n{"name": "read", "arguments": {"path": "/x"}\n',
            '{"name": "read", "arguments": {"path": "/x"',
            '{"name": "read", "arguments": {"path": "/x",},}',
            "{'name': 'read', 'arguments': {'path': '/x'}}",
            '{name: "read", arguments: {path: "/x"}}',
            '```json\n{"name": "read", "arguments": {"path": "/x"}}\n```',
            'read\n{"path": "/x"}',
        )),
        '{"name": "read", "arguments": {"path": "/x"}}',
        '```json\n{"name": "read", "arguments": {"path": "/x"}}\n```',
    ),
    *whole("hermes", NOW,
        tag('{"name": "now", "arguments": ""}'),
        tag("now"),
        '<tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>\n</tool_call>',
    ),
    *whole("hermes", READ + NOW,
        tag('[{"name": "read", "arguments": {"path": "/x"}}, {"name": "now"}]'),
        tag('{"name": "read", "arguments": {"path": "/x"}}\n{"name": "now"}'),
        '<tool_call>{"name": "read", "arguments": {"path": "/x"}}<tool_call>{"name": "now"}',
    ),
    *no_call("hermes",
        *map(tag, (
            '{"name": "write", "arguments": {"mode": 1e999}}',
            '{"name": "write", "arguments": {"path": "/x"}, "content": "hello"}',
            '{"name": "write", "arguments": {"path": "/x"}, "parameters": {"content": "hello"}}',
            '{"name": "read", "file": "/x"}',
            '{"name": "other", "arguments": {"path": "/x"}}',
            '{"name": "read", "arguments": ["/x"]}',
            '{"name": "read", "arguments": {"path": "say "hi""}}',
            '{"name": "read", "arguments": {"path": /x}}',
            'other\n{"path": "/x"}',
        )),
        '{"name": "Bob", "age": 3}',
        "```json\n[1]\n```",
        '<tool_call>{"name": "read", "arguments": {"path": "/x',
        '<tool_call>{"name": "write", "arguments": {"path": "/x"',
        "<tool_call></tool_call>",
        "Say <tool_call> or </tool_call>.",
    ),
    ("hermes", 'So.\n</tool_call>\n<tool_call>{"name": "now"}</tool_call>', "So.", NOW),
    ("hermes", tag('{"name": "now"}') + "\n```python\nprint()\n```", "```python\nprint()\n```", NOW),
    ("hermes", tag("{'name': 'write', 'arguments': {'content': 'a \"b\" it\\'s', 'mode': None}}"),
     "", [("write", {"content": 'a "b" it\'s', "mode": None})]),
    ("hermes", tag('{"name": "write", "arguments": {"content": "one\ntwo\tx", "mode": True}}'),
     "", [("write", {"content": "one\ntwo\tx", "mode": True})]),
    ("hermes", tag('{"name": "write", "arguments": {"content": "\\d+\\\'\\u00e9\\ud83d\\ude00\\uZ"}}'),
     "", [("write", {"content": "\\d+'é😀\\uZ"})]),
    ("hermes", xml(PATH, BODY), "", WRITE),
    *whole("llama", READ,
        '{"name": "read", "arguments": {"path": "/x"}}',
        '```json\n{"name": "read", "parameters": {"path": "/x"}}\n```',
        '{"type": "function", "name": "read", "parameters": {"path": "/x"}}',
    ),
    *whole("llama", READ + NOW,
        '[{"name": "read", "parameters": {"path": "/x"}}, {"name": "now", "parameters": {}}]',
        '{"name": "read", "parameters": {"path": "/x"}}\n{"name": "now", "parameters": {}}',
    ),
    ("llama", 'Well. <|python_tag|>{"name": "now", "parameters": {}}', "Well.", NOW),
    ("llama", '{"name": "read", "parameters": {"path": "/x"}} Done.', "Done.", READ),
    *whole("mistral", READ,
        '[TOOL_CALLS]read[CALL_ID]abcdefghi[ARGS]{"path": "/x"}',
        '[TOOL_CALLS] [{"name": "read", "arguments": {"path": "/x"}, "id": "abcdefghi"}]',
        '[TOOL_CALLS]{"name": "read", "arguments": {"path": "/x"}}',
    ),
    *no_call("mistral",
        "[TOOL_CALLS]read[ARGS]",
        '[TOOL_CALLS]read[ARGS]{"path": "/',
    ),
    ("mistral", 'So. [TOOL_CALLS]read{"path": "/x"}[TOOL_CALLS]now{}', "So.", READ + NOW),
    ("mistral", "[TOOL_CALLS]now[ARGS]", "", NOW),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}]\n[TOOL_CALLS][{"name": "now"}]\n', "", NOW + NOW),
    *[(form, text, "", calls) for form in ("deepseek_v3", "deepseek_v31") for text, calls in (
        (f'{ALL_BEGIN}{BEGIN}function{SEP}read\n```json\n{{"path": "/x"}}\n```{END}{ALL_END}', READ),
        (f'{ALL_BEGIN}{BEGIN}read{SEP}{{"path": "/x"}}{END}{BEGIN}now{SEP}{{}}{END}{ALL_END}', READ + NOW),
        (f'{BEGIN}function{SEP}read\n```json\n{{"path": "/x"}}\n```{END}\n{BEGIN}now{SEP}{{}}', READ + NOW),
        (f'{ALL_BEGIN}read{SEP}{{"path": "/x"}}{ALL_END}', READ),
        (f'{ALL_BEGIN}{BEGIN}{{"name": "read", "arguments": {{"path": "/x"}}}}{END}{ALL_END}', READ),
        (f"{ALL_BEGIN}{BEGIN}now{SEP}{END}{ALL_END}", NOW),
        (f'{ALL_BEGIN}{BEGIN}read{SEP}{{"path": "/x"{END}{ALL_END}', READ),
    )],
    *whole("kimi_k2", READ,
        f'{KIMI} read\n{KIMI_ARGUMENTS} {{"path": "/x"}} {KIMI_END}',
        f'{KIMI_ALL}\n{KIMI}read:3{KIMI_ARGUMENTS}{{"path": "/x"}}{KIMI_ALL_END}',
        f'{KIMI}functions.read:1{KIMI_ARGUMENTS}"{{\\"path\\": \\"/x\\"}}"{KIMI_END}{KIMI_ALL_END}',
    ),
    ("kimi_k2", f'So. {KIMI_ALL}{KIMI}functions.read:0{KIMI_ARGUMENTS}{{"path": "/x"}}{KIMI_END}'
                f"{KIMI}functions.now:1{KIMI_ARGUMENTS}{{}}{KIMI_END}{KIMI_ALL_END}", "So.", READ + NOW),
    ("kimi_k2", f"{KIMI}functions.now:0{KIMI_ARGUMENTS}{KIMI_END}", "", NOW),
    *whole("cohere", READ,
        '<|START_ACTION|>{"tool_name": "read", "parameters": {"path": "/x"}}<|END_ACTION|>',
        '<|START_ACTION|>[{"tool_call_id": 0, "tool_name": "read", "parameters": {"path": "/x"}}]',
    ),
    ("cohere", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "read", "parameters": {"path": "/x"}},\n'
               '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>', "", READ + NOW),
    *whole("gemma4", READ,
        '<|tool_call>call:read{"path":"/x"}<tool_call|>',
        "<|tool_call>call:read{path: '/x'}<tool_call|>",
        f"<|tool_call>call:default_api:mcp.read{{path:{Q}/x{Q}}}<tool_call|>",
    ),
    ("gemma4", f"So.<|tool_call>call:read{{path:{Q}/x{Q}}}<tool_call|><|tool_call>call:now{{}}<tool_call|>",
     "So.", READ + NOW),
    ("gemma4", f"<|tool_call>call:edit{{edits:[{{new:{Q}a \"b\" \\n{{}}{Q},old:{Q}c{Q}}},{{n:-1.5}}],"
               f"options:{{deep:true,{Q}k y{Q}:null}}}}<tool_call|>", "",
     [("edit", {"edits": [{"new": 'a "b" \\n{}', "old": "c"}, {"n": -1.5}],
                          "options": {"deep": True, "k y": None}})]),
    ("gemma4", f"<|tool_call>call:write{{content:{Q}hello{Q}mode:9}}<tool_call|>",
     "", [("write", {"content": "hello", "mode": 9})]),
    ("gemma4", f"<|tool_call>call:read(path={Q}/x{Q})<tool_call|>",
     f"<|tool_call>call:read(path={Q}/x{Q})<tool_call|>", []),
    *whole("qwen_xml", WRITE,
        xml(PATH, OPEN_BODY),
        xml(OPEN_PATH, BODY),
        xml(OPEN_PATH, OPEN_BODY),
        xml(PATH, BODY, end="</tool_call>"),
        xml(PATH, OPEN_BODY, end="</tool_call>"),
        xml(PATH, BODY, begin=""),
        xml(PATH, BODY, end="</function>"),
        xml(PATH, BODY) + "\n</tool_call>",
        xml(PATH, BODY, end="</function>\n</function>\n</tool_call>"),
        "</tool_call>\n" + xml(PATH, BODY),
        xml(PATH.replace("</parameter>", "</parameter>\n</parameter>"), BODY),
        xml(PATH, BODY).replace("\n/x\n", "/x"),
        xml(PATH, BODY).replace("=write", '="write"').replace("=path", '="path"'),
    ),
    *whole("qwen_xml", WRITE + NOW,
        xml(PATH, BODY, end="</function>\n") + xml(name="now"),
        xml(PATH, BODY, end="") + xml(name="now"),
    ),
    *no_call("qwen_xml",
        xml("hello\n"),
        xml(PATH, name="other"),
        xml(PATH, end=""),
        xml(PATH, OPEN_BODY, end=""),
        "<function=write",
        "<function=",
        "<tool_call>\nhello\n</tool_call>",
        "<function=a b>",
    ),
    ("qwen_xml", "I use `<function=` now.\n" + xml(PATH, BODY), "I use `<function=` now.", WRITE),
    ("qwen_xml", tag('{"name": "read", "arguments": {"path": "/x"}}'), "", READ),
    ("qwen_xml", xml("<parameter=content>\nuse <parameter=x>1</parameter> here\n</parameter>\n"),
     "", [("write", {"content": "use <parameter=x>1</parameter> here"})]),
    ("qwen_xml", xml("<parameter=content>\n<parameter=path>\n/y\n</parameter>\nis a tag\n</parameter>\n", PATH),
     "", [("write", {"content": "<parameter=path>\n/y\n</parameter>\nis a tag", "path": "/x"})]),
    ("qwen_xml", xml("<parameter=content>\n<parameter=x>1</parameter>\n</parameter>\n"),
     "", [("write", {"content": "<parameter=x>1</parameter>"})]),
    ("qwen_xml", xml("<parameter=mode>\n1e999\n</parameter>\n"), "", [("write", {"mode": "1e999"})]),
    *whole("seed", WRITE,
        "<seed:tool_call>\n<function=write>\n<parameter=path>/x\n<parameter=content>hello</parameter>\n"
             "</function>\n</seed:tool_call>",
        "<seed:tool_call>\n<function=write>\n<parameter=path>/x</parameter>\n"
             "<parameter=content>hello</parameter>\n</seed:tool_call>",
    ),
    *whole("glm", WRITE,
        *map(tag, (
            f"write\n{PAIR_PATH}{PAIR_BODY}",
            f"write\n{PAIR_PATH.replace('</arg_value>', '')}{PAIR_BODY}",
            f"write\n{PAIR_PATH}{PAIR_BODY.replace('</arg_value>', '')}",
            f"write\n{PAIR_PATH.replace('</arg_key>', '')}{PAIR_BODY}",
        )),
        tag(f"write{PAIR_PATH}{PAIR_BODY}".replace("\n", "")),
    ),
    ("glm", tag('{"name": "read", "arguments": {"path": "/x"}}'), "", READ),
    ("glm", tag("other"), tag("other"), []),
    *whole("minimax_m2", WRITE,
        f'<invoke name="write">\n{INVOKE_PATH}{INVOKE_BODY}</invoke>',
        invoke(INVOKE_PATH.replace("</parameter>", ""), INVOKE_BODY),
        invoke(INVOKE_PATH, INVOKE_BODY.replace("</parameter>", "")),
        invoke('{"path": "/x", "content": "hello"}\n'),
    ),
    ("minimax_m2", "So.\n" + invoke(INVOKE_PATH, INVOKE_BODY), "So.", WRITE),
    ("minimax_m2", invoke(INVOKE_PATH, INVOKE_BODY).replace("</invoke>", '</invoke>\n<invoke name="now">\n</invoke>'),
     "", WRITE + NOW),
    ("minimax_m2", invoke('<parameter name="content">a </minimax:tool_call> b</parameter>\n'),
     "", [("write", {"content": "a </minimax:tool_call> b"})]),
    *[(form, text, content, calls) for form in ("deepseek_v32", "deepseek_v4") for text, content, calls in (
        ("So.\n\n" + dsml(DSML_PATH, DSML_BODY), "So.", WRITE),
        (dsml(DSML_PATH, DSML_BODY, block="tool_calls"), "", WRITE),
        (dsml(DSML_PATH, DSML_BODY).replace("｜DSML｜", ""), "", WRITE),
        (dsml(DSML_PATH.replace("</｜DSML｜parameter>", ""), DSML_BODY), "", WRITE),
        (dsml('{"path": "/x", "content": "hello"}\n'), "", WRITE),
        (dsml(DSML_BODY, '<｜DSML｜parameter name="mode" string="false">3</｜DSML｜parameter>\n'), "",
         [("write", {"content": "hello", "mode": 3})]),
        (dsml('<｜DSML｜parameter name="mode" string="true">3</｜DSML｜parameter>\n'), "", [("write", {"mode": 3})]),
        (dsml(name="now"), "", NOW),
    )],
]  # fmt: skip


def answer(form, parts, **options):
    """Content and calls of an answer in parts."""
    stream = AnswerFormat(None, FORMATS[form]).stream(TOOLS, is_open=False, **options)
    _, content, calls = read(stream, parts)
    assert stream.num_calls == len(calls)
    return content, calls


@pytest.mark.parametrize("form, text, content, calls", CALLS)
def test_a_call_is_read_with_all_its_arguments_or_stays_text(form, text, content, calls):
    for parts in cuts(text, random.Random(text)):
        shown, found = answer(form, parts)
        assert (shown, loaded(found)) == (content, calls), parts


HARMONY = "<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
STREAMED = [
    *CALLS,
    ("harmony", HARMONY + '{"path": "/x"}<|call|>', "", READ),
    ("harmony", HARMONY.replace("functions.", "") + "{'path': '/x'}<|call|>", "", READ),
    ("harmony", HARMONY.replace("read", "now") + "<|call|>", "", NOW),
    ("harmony", "<|channel|>commentary<|message|>So.<|end|><|start|>assistant" + HARMONY + '{"path":"/x"}<|call|>',
                "So.", READ),
    ("harmony", HARMONY + '{"path": "/x"} as asked<|call|>', " as asked", READ),
    ("harmony", HARMONY + '{"path": "/x"}}<|call|>', "}", READ),
]  # fmt: skip


@pytest.mark.parametrize("form, text", [(form, text) for form, text, *_ in CALLS if form != "harmony"])
@pytest.mark.costly
def test_damaged_calls_are_read_the_same_however_they_are_cut(form, text):
    draw = random.Random(text)
    for _ in range(20):
        pieces = re.findall(r"<[^<>]*>|\w+|\s+|.", text)
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(pieces))
            pieces[place : place + draw.randrange(2)] = draw.choice(
                ["", "}", '"', "<", "```", "a text ", pieces[place]]
            )
        damaged = "".join(pieces)
        whole, *others = (answer(form, parts) for parts in cuts(damaged, draw))
        assert all(each == whole for each in others), damaged


@pytest.mark.parametrize("form, text, content, calls", STREAMED)
def test_parts_of_calls_join_to_the_whole_answers_calls_however_it_is_cut(form, text, content, calls):
    shown, expected = answer(form, [text])
    assert (shown, loaded(expected)) == (content, calls)
    for parts in cuts(text, random.Random(text)):
        streamed, found = answer(form, parts, streams_calls=True)
        if calls:
            assert (streamed, found) == (content, expected), parts
        else:  # a call that turned out to be none, or was cut off, may have begun, and stays incomplete
            assert content.endswith(streamed)
            assert all(name in TOOLS and not is_json(arguments) for name, arguments in found), parts
            assert found or streamed == content


@pytest.mark.parametrize(
    "form, parts, arguments",
    [
        ("hermes", ['<tool_call>{"name": "wri', 'te", "arguments": {"con', 'tent": "one', " two", '", "mode": 1',
                    "}}"],
                   [None, '{"con', 'tent": "one', " two", '", "mode": ', "1}"]),
        ("mistral", ["[TOOL_CALLS]write[ARGS]", '{"content"', ':"one', ' two"', "}"],
                    [None, '{"content"', ': "one', ' two"', "}"]),
        ("gemma4", ["<|tool_call>call:write{", f"content:{Q}one", ' "two"', f"{Q}", "}<tool_call|>"],
                   ["{", '"content": "one', ' \\"two\\"', '"', "}"]),
        ("qwen_xml", ["<tool_call>\n<function=write>\n<parameter=content>\none", "\n</parameter>\n<parameter=",
                      "mode>\n1\n</parameter>\n</function>"], [None, '{"content": "one"', ', "mode": 1}']),
        ("harmony", [HARMONY.replace("read", "write"), '{"content"', ': "one', ' two"}', "<|call|>"],
                    [None, '{"content"', ': "one', ' two"', "}"]),
    ],
)  # fmt: skip
def test_arguments_stream_as_the_model_writes_them(form, parts, arguments):
    stream = AnswerFormat(None, FORMATS[form]).stream(TOOLS, is_open=False, streams_calls=True)
    found = [stream.add(part, is_last=False).calls for part in parts]
    assert [call[0]["function"]["arguments"] if call else None for call in found] == arguments
    assert sum("id" in part for call in found for part in call) == 1
