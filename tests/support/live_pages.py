"""The live view in a browser: pages that may have no error and ask for nothing foreign, and what one does on them."""

import contextlib
import re

from playwright.sync_api import expect

expect.set_options(timeout=20_000)

QUESTION = "The capital of France is a large town by a river, and which one is it?"
NARROW, WIDE = (360, 740), (1440, 900)

# What is not as an accessibility tree needs it: each thing that one works has a name, and ids are unique.
UNNAMED = """() => {
    const labelled = (one) => one.ariaLabel || one.labels?.length || one.getAttribute("aria-labelledby");
    const named = (one) => labelled(one) || (one.matches("button, a, summary") && one.textContent.trim());
    const worked = "button, input, textarea, select, a, summary, canvas:not([aria-hidden]), [tabindex], dialog";
    const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
    const labelledby = [...document.querySelectorAll("[aria-labelledby]")];
    const references = labelledby.map((one) => one.getAttribute("aria-labelledby"));
    return [
        ...[...document.querySelectorAll(worked)].filter((one) => !named(one)).map((one) => one.outerHTML.slice(0, 80)),
        ...ids.filter((id, place) => ids.indexOf(id) !== place),
        ...references.filter((id) => !document.getElementById(id)?.textContent.trim()),
    ];
}"""


@contextlib.contextmanager
def live_pages(browser):
    """Opens pages; fails at the end for an error, warning or foreign request that the test does not allow."""
    contexts, problems = [], []

    def open_page(url, size=WIDE, scheme="light", allowed="$^"):
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()

        def note(text):
            if not re.search(allowed, text):
                problems.append(text)

        page.on("pageerror", lambda error: note(str(error)))
        page.on("console", lambda message: note(message.text) if message.type in ("error", "warning") else None)
        own = ("data:", "blob:", url)
        page.on("request", lambda request: note(request.url) if not request.url.startswith(own) else None)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def question(page):
    return page.get_by_label("Message", exact=True)


def ask(page, text=QUESTION, max_tokens=40):
    page.get_by_label("Max tokens").fill(str(max_tokens))
    question(page).fill(text)
    question(page).press("Enter")


def press(page, name):
    page.get_by_role("button", name=name).click()


def answered(page, number):
    """Wait until this many answers are whole."""
    expect(page.locator(".message .facts")).to_have_count(number)


def shows(page, selector, text):
    expect(page.locator(selector)).to_have_text(text)


def contains(page, selector, text):
    expect(page.locator(selector)).to_contain_text(text)


def matches(page, selector, pattern):
    expect(page.locator(selector)).to_contain_text(re.compile(pattern))


def state(page, text):
    expect(page.locator("#state")).to_have_text(text)
