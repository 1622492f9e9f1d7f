"""A server for the tests of a file and clients for it; a file that needs another server has a `running` of its own."""

from functools import partial

import pytest

from tests.support.serving import MODEL, served, serving, user

running = served(serving)


@pytest.fixture(scope="module")
def client(running):
    with running.client() as client:
        yield client


@pytest.fixture
def open_page(browser):
    from tests.support.live_pages import live_pages

    with live_pages(browser) as open_page:
        yield open_page


@pytest.fixture
def page(running, open_page):
    from tests.support.live_pages import state

    page = open_page(running.url)
    state(page, "live")
    return page


@pytest.fixture(scope="module")
def chat(client):
    return partial(client.chat.completions.create, model=MODEL, messages=[user("Hello")])
