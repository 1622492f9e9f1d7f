"""The live view's chat in a browser: Markdown that cannot run, edits, retries, conversations that stay, and curl."""

import json
import shlex

import pytest
from playwright.sync_api import expect

from tests.support.live_pages import answered, ask, contains, matches, press, question, shows, state
from tests.support.serving import served, serving, user

# Each would run script, load something or break out of its place, in one renderer of Markdown or another.
HOSTILE = """<script>document.title = "ran"</script>
<img src=x onerror="document.title='ran'"><svg onload="document.title='ran'"></svg>

[a](javascript:document.title='ran') [b](JaVaScRiPt&colon;document.title='ran')
[c](data:text/html,<script>parent.document.title='ran'</script>)
[d](&#106;avascript:document.title='ran') <javascript:document.title='ran'>
[e](vbscript:x) [f](//evil.example/x) [g]("onclick=x)
![h](https://evil.example/pixel.png) ![i](javascript:document.title='ran' "t")

| x |
|---|
| <iframe srcdoc="<script>parent.document.title='ran'</script>"></iframe> |

- <details open ontoggle="document.title='ran'">
- [x] <b onmouseover="document.title='ran'">bold</b>

```html"><img src=x onerror="document.title='ran'">
</code></pre><script>document.title = "ran"</script>
```

<math><mtext></mtext><mglyph><style><img src=x onerror="document.title='ran'"></style></mglyph></math>
<a href="javascript:document.title='ran'">z</a> <form action="https://evil.example"><input name=x></form>

[r]: javascript:document.title='ran'
[r] and [ok](https://example.org/?a=1&b=2)
"""
ALLOWED = {"P", "A", "CODE", "PRE", "DIV", "SPAN", "BUTTON", "UL", "LI", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"}


running = served(lambda: serving(max_model_len=1024))


def answer_with(page, text, size=7):
    """Answer the page's questions with `text` in pieces of `size` characters; returns the list of their bodies."""
    bodies = []

    def fulfil(route):
        bodies.append(route.request.post_data_json)
        deltas = [{"content": text[at : at + size]} for at in range(0, len(text), size)]
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        events = [f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n" for choice in choices]
        route.fulfill(content_type="text/event-stream", body="".join(events) + "data: [DONE]\n\n")

    page.route("**/v1/chat/completions", fulfil)
    return bodies


def said(page):
    return page.locator(".message.assistant .said").last


@pytest.mark.full
def test_markdown_is_shown_as_headings_lists_tables_and_code(page):
    answer_with(
        page,
        "# Title\n\nA **bold** `x < 1` and\n\n1. one\n2. two\n   - in\n\n| a | b |\n|--|--:|\n| 1 | 2 |\n\n"
        "> quote &amp; more\n\n" + "-" * 80 + "\n\n```python\nif a < b:\n    pass\n```\n\n[site](https://example.org)",
    )
    ask(page)
    answered(page, 1)
    said_by = said(page)
    shows(said_by, "h3", "Title")
    shows(said_by, "strong", "bold")
    shows(said_by, "p code", "x < 1")
    assert said_by.locator("ol > li").count() == 2
    shows(said_by, "ol ul li", "in")
    expect(said_by.locator("td").nth(1)).to_have_text("2")
    shows(said_by, "blockquote", "quote & more")
    assert said_by.locator("hr").count() == 1
    shows(said_by, "pre code", "if a < b:\n    pass")
    shows(said_by, ".code_head span", "python")
    expect(said_by.get_by_role("link")).to_have_attribute("href", "https://example.org/")
    expect(said_by.get_by_role("link")).to_have_attribute("rel", "noopener noreferrer")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    said_by.get_by_role("button", name="Copy code").click()
    shows(page, "#announce", "Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == "if a < b:\n    pass"


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 4000])
def test_nothing_of_what_the_model_says_runs_or_loads(page, size):
    answer_with(page, HOSTILE, size)
    ask(page, "<b>bold?</b><script>document.title = 'ran'</script>")
    answered(page, 1)
    for _ in range(2):  # as it came, and as it was kept
        said_by = page.locator(".said *")
        assert set(said_by.evaluate_all("(all) => all.map((one) => one.tagName)")) <= ALLOWED
        attributes = said_by.evaluate_all("(all) => all.flatMap((one) => one.getAttributeNames())")
        assert set(attributes) <= {"class", "href", "target", "rel", "title", "tabindex", "role", "aria-label", "type"}
        links = page.locator(".said a").evaluate_all("(all) => all.map((one) => one.href)")
        assert set(links) == {"https://evil.example/pixel.png", "https://example.org/?a=1&b=2"}
        expect(said(page)).to_contain_text("<iframe srcdoc=")
        contains(page, ".message.user .said", "<b>bold?</b>")
        assert page.title() == "nanovllm"
        page.reload()
        expect(page.locator(".message .facts")).to_have_count(1)


@pytest.mark.full
def test_the_browser_refuses_to_parse_text_as_html(running, open_page):
    page = open_page(running.url, allowed="TrustedHTML|Trusted Type|Content Security Policy|violates")
    refused = """() => { try { document.body.innerHTML = "<b>x</b>"; return false; }
                         catch (error) { return error instanceof TypeError; } }"""
    assert page.evaluate(refused)


@pytest.mark.full
@pytest.mark.parametrize(
    "text", [">" * 30_000 + "x", "- " * 5_000 + "x", "-   " * 46 + "x", "[" * 3_000, "`" * 9_999, "*a " * 3_000]
)
def test_text_that_would_exhaust_a_parser_is_shown_all_the_same(page, text):
    answer_with(page, text, 10_000)
    ask(page)
    answered(page, 1)
    assert len(said(page).inner_text()) > 0
    ask(page)
    answered(page, 2)


@pytest.mark.full
def test_reasoning_is_apart_from_the_answer(page):
    chunk = {"reasoning_content": "Let me <b>think</b>.", "content": "Paris"}
    event = {"id": "x", "choices": [{"index": 0, "delta": chunk, "finish_reason": "stop"}]}
    body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(page)
    expect(said(page)).to_have_text("Paris")
    page.get_by_text("Reasoning", exact=True).click()
    shows(page, ".thought .plain", "Let me <b>think</b>.")


@pytest.mark.full
def test_a_question_is_edited_and_an_answer_is_tried_again(page):
    bodies = answer_with(page, "Yes.")
    for number, text in enumerate(("one", "two", "three"), 1):
        ask(page, text)
        answered(page, number)
    with page.expect_response("**/v1/chat/completions"):
        press(page, "Retry")
    answered(page, 3)
    assert bodies[3]["messages"] == bodies[2]["messages"]
    page.locator(".message.user").nth(1).get_by_role("button", name="Edit").click()
    expect(question(page)).to_have_value("two")
    expect(page.locator("#editing")).to_be_visible()
    question(page).press("Escape")
    expect(question(page)).to_have_value("")
    page.locator(".message.user").nth(1).get_by_role("button", name="Edit").click()
    question(page).fill("2")
    question(page).press("Enter")
    answered(page, 2)
    assert [message["content"] for message in bodies[4]["messages"]] == ["one", "Yes.", "2"]
    question(page).press("ArrowUp")
    expect(question(page)).to_have_value("2")


@pytest.mark.full
def test_system_prompt_and_fields_are_sent_and_empty_ones_are_not(page):
    bodies = answer_with(page, "Yes.")
    page.get_by_text("System prompt and sampling").click()
    page.get_by_label("System prompt", exact=True).fill("Be short.")
    page.get_by_label("Top-p").fill("0.9")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Temperature").fill("")
    ask(page, "Hi", max_tokens=9)
    answered(page, 1)
    assert bodies[0]["messages"] == [{"role": "system", "content": "Be short."}, user("Hi")]
    sampling = {"max_completion_tokens": 9, "top_p": 0.9, "seed": 7}
    assert bodies[0] == sampling | {name: bodies[0][name] for name in ("model", "messages", "stream", "stream_options")}
    page.reload()
    expect(page.get_by_label("Top-p")).to_have_value("0.9")
    expect(page.get_by_label("System prompt", exact=True)).to_have_value("Be short.")


@pytest.mark.full
def test_a_seed_gives_the_same_answer_again_and_the_server_accepts_every_field(page):
    page.get_by_text("System prompt and sampling").click()
    fields = (("Top-p", "0.9"), ("Top-k", "20"), ("Min-p", "0.01"), ("Repetition penalty", "1.1"), ("Seed", "5"))
    for name, value in fields:
        page.get_by_label(name).fill(value)
    ask(page, max_tokens=20)
    answered(page, 1)
    first = said(page).inner_text()
    press(page, "Retry")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    answered(page, 1)
    assert said(page).inner_text() == first != ""


@pytest.mark.full
def test_conversations_stay_in_the_browser_until_they_are_deleted(page):
    answer_with(page, "Yes.")
    for text in ("first one", "second <b>one</b>"):
        ask(page, text)
        answered(page, 1)
        press(page, "New conversation")
        expect(page.locator(".message")).to_have_count(0)
    press(page, "Conversations")
    rows = page.locator("#list .title")
    expect(rows).to_have_text(["second <b>one</b>", "first one"])
    with page.expect_download() as download:
        press(page, "Export all")
    exported = json.loads(download.value.path().read_text())
    assert [one["messages"] for one in exported] == [
        [user(text), {"role": "assistant", "content": "Yes."}] for text in ("second <b>one</b>", "first one")
    ]
    rows.nth(1).click()
    shows(page, ".message.user .said", "first one")
    page.reload()
    shows(page, ".message.user .said", "first one")  # the tab stays with its own
    press(page, "Conversations")
    press(page, "Delete: first one")
    expect(rows).to_have_count(2)
    press(page, "Sure? Delete: first one")
    expect(rows).to_have_text(["second <b>one</b>"])
    expect(page.locator(".message")).to_have_count(0)  # it was open
    press(page, "Delete all")
    press(page, "Sure?")
    shows(page, "#list", "None yet.")
    assert "one" not in page.evaluate("() => Object.keys(localStorage).filter((key) => key.includes('chat')).join()")


@pytest.mark.full
def test_what_others_wrote_into_the_storage_is_passed_over(page):
    page.evaluate(
        """() => { localStorage.setItem("nanovllm-chat-a", "{"); localStorage.setItem("nanovllm-chat-b", '{"id": 1}');
                   localStorage.setItem("nanovllm-fields", "[1"); sessionStorage.setItem("nanovllm-open", "a"); }"""
    )
    page.reload()
    state(page, "live")
    press(page, "Conversations")
    shows(page, "#list", "None yet.")


@pytest.mark.full
def test_a_full_storage_is_told_and_the_answer_is_shown(page):
    page.evaluate(
        """() => { let size = 1 << 22; while (size >= 1) {
            try { localStorage.setItem("fill" + size + Math.random(), "x".repeat(size)); } catch { size >>= 1; } } }"""
    )
    answer_with(page, "Yes.")
    ask(page)
    expect(said(page)).to_have_text("Yes.")
    contains(page, "#storage", "no room")


@pytest.mark.full
def test_the_next_request_as_curl_is_what_the_page_would_send(running, page):
    text = 'It\'s $HOME `date` "x" \\ and\na line'
    question(page).fill(text)
    page.get_by_label("Max tokens").fill("5")
    page.get_by_text("System prompt and sampling").click()
    press(page, "As curl")
    words = [word for word in shlex.split(page.locator("#text").inner_text()) if word.strip()]
    assert words[:2] == ["curl", f"{running.url}/v1/chat/completions"]
    assert words[2:5:2] == ["-H", "-d"]
    body = json.loads(words[5])
    assert body["messages"] == [user(text)]
    answer = running.post("/v1/chat/completions", content=words[5], headers=dict([words[3].split(": ")]))
    assert answer.json()["usage"]["completion_tokens"] <= 5
    page.evaluate("() => sessionStorage.setItem('nanovllm-api-key', 'secret')")
    press(page, "Close")
    press(page, "As curl")
    matches(page, "#text", r"Bearer \$NANOVLLM_API_KEY")
    assert "secret" not in page.locator("#text").inner_text()
