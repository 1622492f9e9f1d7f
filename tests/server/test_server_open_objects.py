"""Objects of a document are closed in every API that asks for one, unless the server or the request opens them."""

import pytest

from tests.support.scripted import ending_model
from tests.support.serving import MODEL, serving, user

ASK = [user("x")]
OPEN = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
NAMED = {"name": "n", "schema": OPEN}
SIZE = {"max_tokens": 40, "temperature": 0}
REQUESTS = {
    "chat": ("/v1/chat/completions",
             SIZE | {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": NAMED}}),
    "completion": ("/v1/completions",
                   SIZE | {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": NAMED}}),
    "responses": ("/v1/responses", {"max_output_tokens": 40, "temperature": 0, "input": "x",
                                    "text": {"format": {"type": "json_schema", **NAMED}}}),
    "ollama": ("/api/chat", {"messages": ASK, "format": OPEN, "stream": False,
                             "options": {"num_predict": 40, "temperature": 0}}),
    "ollama generate": ("/api/generate", {"prompt": "x", "format": OPEN, "stream": False,
                                          "options": {"num_predict": 40, "temperature": 0}}),
}  # fmt: skip


@pytest.fixture
def forms(monkeypatch):
    """Watches a server; has the schemas that its engine is given, in their order."""

    def watch(running):
        submit = running.engine.submit

        async def noted(prompts, params, **options):
            watch.given.append(params.structured_output.json_schema or params.structured_output.grammar)
            return await submit(prompts, params, **options)

        monkeypatch.setattr(running.engine, "submit", noted)

    watch.given = []
    return watch


@pytest.mark.costly
@pytest.mark.parametrize("opens", [False, True])
def test_a_document_has_the_properties_of_its_schema_alone(forms, opens):
    with serving({"open_objects": opens}, model=ending_model()) as running:
        forms(running)
        for path, body in REQUESTS.values():
            for own in (None, False, True):
                running.answer(path, {"model": MODEL}, body, {} if own is None else {"open_objects": own})
                is_open = opens if own is None else own
                assert ('"additionalProperties": false' not in forms.given[-1]) is is_open, (path, own)


def test_schemas_of_other_fields_keep_the_standards_meaning(forms):
    with serving(model=ending_model()) as running:
        forms(running)
        for body in (
            {"guided_json": OPEN},
            {"structured_outputs": {"json": OPEN}},
            {"response_format": {"type": "json_object"}},
        ):
            running.answer("/v1/chat/completions", {"messages": ASK}, SIZE, body)
            assert "additionalProperties" not in (forms.given[-1] or "")


def test_a_schema_that_cannot_be_closed_is_named():
    chain = {f"d{number}": {"allOf": [{"$ref": f"#/$defs/d{number + 1}"}]} for number in range(60)}
    schema = {"$defs": chain | {"d60": {"properties": {"a": {}}}}, "$ref": "#/$defs/d0", "type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with serving(model=ending_model()) as running:
        body = {"messages": ASK, "response_format": form} | SIZE
        running.refuses("/v1/chat/completions", "response_format.json_schema.schema", "open_objects", body)
