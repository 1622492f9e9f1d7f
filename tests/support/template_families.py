"""Chat templates of model families, rebuilt as small ones: each reads, refuses and leaves out the same."""

_RAISE = "{{ raise_exception('%s') }}"
_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + _RAISE % "Conversation roles must alternate user/assistant/user/assistant/..."
    + "{% endif %}"
)
_TURN = "{{ '<|' ~ m.role ~ '|>' }}"
_ANSWER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
_TOOLS_WALKED = (
    "{% for t in tools or [] %}{{ t.function.name + ': ' + t.function.description }}"
    "{% for name, schema in t.function.parameters.properties | items %} {{ name }}{% endfor %}{% endfor %}"
)
_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
)
_NINE = _RAISE % "Tool call IDs should be alphanumeric strings with length 9!"
_PARTS = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
_EITHER = "{% if m.content is string %}{{ m.content | trim }}{% else %}" + _PARTS + "{% endif %}"


def _each(turn, *, first=""):
    return first + "{% for m in messages %}" + turn + "{% endfor %}" + _ANSWER


FAMILIES = {
    "chatml": _each(_TURN + "{{ '' + m.content }}<|end|>"),
    "hermes": _each(_TURN + "{{ m.content }}" + _CALLS + "<|end|>", first=_TOOLS),
    "qwen": _each(
        "{% if m.role == 'system' and not loop.first %}" + _RAISE % "System message must be at the beginning."
        + "{% endif %}" + _TURN + "{{ m.content }}{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
        "{% for name, value in c.function.arguments | items %}<parameter={{ name }}>{{ value }}</parameter>{% endfor %}"
        "</function>{% endfor %}<|end|>",
        first=_TOOLS,
    ),
    "llama": _each(
        "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        + _RAISE % "This model only supports single tool-calls at once!" + "{% endif %}" + _TURN
        + '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
        "{{ m.tool_calls[0].function.arguments | tojson }}}<|end|>{% else %}" + _TURN
        + "{{ m.content | trim if m.content is string else m.content | tojson }}<|end|>{% endif %}",
        first=_TOOLS_WALKED,
    ),
    "mistral": _each(
        "{% if m.tool_calls is defined and m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
        "{% if c.id is not defined or c.id | length != 9 %}" + _NINE + "{% endif %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
        "{% endfor %}]{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}" + _NINE + "{% endif %}"
        '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
        "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.role == 'system' and loop.first %}{{ m.content }}"
        "{% elif m.role == 'assistant' %}{{ m.content }}<|end|>{% else %}"
        + _RAISE % "Only user and assistant roles are supported!" + "{% endif %}",
        first=_TOOLS,
    ),
    "gemma 2": _each(
        _ALTERNATE + _TURN + "{{ m.content | trim }}<|end|>",
        first="{% if messages[0].role == 'system' %}" + _RAISE % "System role not supported" + "{% endif %}",
    ),
    "gemma 3": (
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content if messages[0].content is string else "
        "messages[0].content[0].text %}{% set rest = messages[1:] %}{% else %}{% set first = '' %}"
        "{% set rest = messages %}{% endif %}{% for m in rest %}" + _ALTERNATE + _TURN
        + "{{ first ~ '\n\n' if loop.first and first else '' }}" + _EITHER + "<|end|>{% endfor %}" + _ANSWER
    ),
    "smolvlm": _each(
        "{{ m.role | capitalize }}{% if m.content[0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
        + _PARTS + _CALLS + "<|end|>"
    ),
    "deepseek": _each(
        "{% if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'system' and loop.first %}{{ m.content }}"
        "{% elif m.role == 'tool' %}<tool_output>{{ m.content }}</tool_output>{% elif m.role == 'assistant' %}"
        "<|assistant|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}{% endfor %}<|end|>{% endif %}"
    ),
    "kimi": _each(
        _TURN + "{% if m.role == 'tool' %}{{ '## Return of ' ~ m.tool_call_id ~ '\n' }}{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.id }}<args>{% if c.function.arguments is string %}"
        "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}<|end|>",
        first=_TOOLS,
    ),
    "harmony": _each(
        "{% if m.tool_calls %}{% if m.content and m.thinking %}"
        + _RAISE % "Cannot pass both content and thinking in an assistant message with tool calls!"
        + "{% endif %}<|assistant|>analysis{{ m.content or m.thinking }}<|assistant|> to=functions."
        "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% elif m.role == 'tool' %}{{ 'functions.' ~ m.name ~ ' to=assistant' ~ (m.content | tojson) }}"
        "{% else %}" + _TURN + "{{ m.content }}<|end|>{% endif %}",
        first=_TOOLS_WALKED,
    ),
    "glm": (
        "{% macro visible(content) %}{% if content is string %}{{ content }}"
        "{% elif content is iterable and content is not mapping %}"
        "{% for item in content %}{% if item is mapping and item.type == 'text' %}{{ item.text }}"
        "{% elif item is string %}{{ item }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    )
    + _each(
        "{% if m.role == 'tool' %}<|observation|>{% else %}" + _TURN + "{% endif %}{{ visible(m.content) }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
        "{% for name, value in c.function.arguments.items() %}"
        "<arg_key>{{ name }}</arg_key><arg_value>{{ value }}</arg_value>{% endfor %}</tool_call>{% endfor %}",
        first=_TOOLS,
    ),
    "deepseek r1": _each(
        "{% if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'tool' %}<tool_output>{{ m.content }}"
        "{% elif m.role == 'assistant' and m.content is none %}<|assistant|>{% for c in m.tool_calls %}"
        "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}{% endfor %}<|end|>"
        "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}",
        first="{% set ns = namespace(rule='') %}{% for m in messages if m.role == 'system' %}"
        "{% set ns.rule = m.content %}{% endfor %}{{ ns.rule }}",
    ),
    "command-r": (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set rest = messages[1:] %}{% else %}"
        "{% set rest = messages %}{% endif %}{% for m in rest %}" + _ALTERNATE
        + "{% if m.role in ('user', 'assistant') %}" + _TURN + "{{ m.content }}{% endif %}{% endfor %}" + _ANSWER
    ),
    "granite": _each(
        _TURN + "{% if m.role == 'assistant' and m.tool_calls %}{{ m.tool_calls | tojson }}"
        "{% else %}{{ m.content }}{% endif %}<|end|>",
        first=_TOOLS,
    ),
    "first part": _each(_TURN + "{{ m.content[0].text }}<|end|>"),
    "mistral 7": _each(
        "{% if m.content is string %}" + _TURN + "{{ m.content }}{% elif m.role == 'user' %}" + _TURN + _PARTS
        + "{% else %}" + _TURN + "{{ m.content[0].text }}{% endif %}<|end|>"
    ),
    "phi 4 mini": _each(
        "{{ '<|' + m.role + '|>' + m.content }}{% if m.role == 'system' and 'tools' in m and m.tools is not none %}"
        "{{ '<|tool|>' + m['tools'] + '<|/tool|>' }}{% endif %}<|end|>"
    ),
    "hermes 2": (
        "{% macro spelled(schema) %}{% if schema.type in ('string', 'array', 'object') %}str"
        "{% elif schema.type is iterable %}{% for one in schema.type %}"
        "{{ spelled({'type': one}) }}{% endfor %}{% endif %}{% endmacro %}"
    )
    + _each(
        _TURN + "{% if m.tool_calls %}" + _CALLS + "{% else %}{{ m.content }}{% endif %}<|end|>",
        first="{% for t in tools %}{{ t.function.name }}{% for name in t.function.parameters.properties %}"
        "{{ name ~ spelled(t.function.parameters.properties[name]) }}{% endfor %}{% endfor %}",
    ),
    "mistral nemo": _each(
        "{% if m.role == 'user' %}[INST]{{ messages[0].content if loop.last and messages[0].role == 'system' }}"
        "{{ m.content }}[/INST]{% elif m.role != 'system' %}{{ m.content }}" + _CALLS + "{% endif %}",
        first=_TOOLS,
    ),
    "command a": _each(
        "{% if m.role == 'assistant' %}" + _TURN + "{{ '' if m.tool_calls else m.content[0] + m.content[1:] }}"
        "{{ m.content if m.tool_calls }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
        "{% for r in messages if r.role == 'tool' and r.tool_call_id == c.id %}{{ r.content }}{% endfor %}{% endfor %}"
        "{% elif m.role != 'tool' %}" + _TURN + "{{ m.content }}{% endif %}<|end|>",
        first=_TOOLS,
    ),
}  # fmt: skip
