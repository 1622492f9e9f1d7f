"""Pictures on the live page, in a browser: added, shown small, removed, sent, and back for another question."""

import pytest
from playwright.sync_api import expect

from tests.support.live_pages import answered, ask, live_pages, press, question, state
from tests.support.picture_models import png, random_images, save_llava
from tests.support.serving import serving

pytestmark = pytest.mark.full


def test_a_question_with_a_picture_is_asked_edited_and_asked_again(browser, tmp_path):
    _, processor = save_llava(tmp_path)
    sizes = {"num_kv_blocks": 64, "max_model_len": 256}
    bodies = []
    files = [{"name": f"{n}.png", "mimeType": "image/png", "buffer": png(random_images()[n])} for n in range(2)]
    with (
        serving({}, model=tmp_path, tokenizer=processor.tokenizer, **sizes) as running,
        live_pages(browser) as open_page,
    ):
        page = open_page(running.url)
        state(page, "live")
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        page.locator("#picture_files").set_input_files(files)
        press(page, "Remove picture 1")
        expect(page.locator("#pictures .thumbnail")).to_have_count(1)
        ask(page, "what is it", max_tokens=4)
        answered(page, 1)
        expect(page.locator("#pictures .thumbnail")).to_have_count(0)
        shown = page.locator(".message.user .thumbnail")
        expect(shown).to_have_count(1)
        assert shown.evaluate("async (picture) => { await picture.decode(); return picture.naturalWidth; }") > 0
        press(page, "Edit")
        expect(page.locator("#pictures .thumbnail")).to_have_count(1)
        question(page).press("Enter")
        answered(page, 1)
        page.reload()
        expect(shown).to_have_count(1)  # kept by the browser
    (picture, text), again = (body["messages"][0]["content"] for body in bodies)
    assert picture["image_url"]["url"].startswith("data:image/png;base64,") and text["text"] == "what is it"
    assert again == [picture, text]


def test_a_model_of_text_offers_no_pictures(browser):
    with serving({}) as running, live_pages(browser) as open_page:
        page = open_page(running.url)
        state(page, "live")
        expect(page.get_by_role("button", name="Add pictures")).to_have_count(0)
