"""The live view's page in a browser: chat, figures, pause, scrubbing, and every state of the server."""

import re
import threading

import pytest
from playwright.sync_api import expect

from tests.support.async_llms import in_engine_steps, slow_steps
from tests.support.live_pages import (
    NARROW,
    QUESTION,
    UNNAMED,
    WIDE,
    answered,
    ask,
    contains,
    matches,
    press,
    question,
    shows,
    state,
)
from tests.support.llms import comes_true
from tests.support.serving import serving, streaming
from tests.support.tiny_classes import tiny_class_model
from tests.support.tiny_models import save_tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def running():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "\n")  # no token that ends a random answer
    with serving(tokenizer=tokenizer, max_model_len=1024) as running:
        yield running


LONG = {"prompt": QUESTION, "max_tokens": 900, "ignore_eos": True}


def step(page):
    found = re.match(r"step ([\d,]+)", page.locator("#readout").inner_text())
    return int(found[1].replace(",", "")) if found else 0


def tile_shows(page, name, pattern):
    expect(page.locator(".tile", has_text=name)).to_contain_text(re.compile(pattern))


def tile(page, name):
    return page.locator(".tile", has_text=name).inner_text()


def test_one_asks_and_sees_the_answer_come_and_the_engine_at_work(running, page, monkeypatch):
    is_seen = threading.Event()
    in_engine_steps(running.engine, monkeypatch, lambda _: is_seen.wait(0.05))  # slow steps until the page was checked
    contains(page, "#model", "tiny")
    before = step(page)
    ask(page, max_tokens=100)
    said = page.locator(".message.assistant .said")
    expect(said).not_to_be_empty()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    matches(page, "#requests .state", "prefill|decode")
    contains(page, "#requests .own", "yours")
    matches(page, "#requests .number", r"\d+ / 1\d\d")  # to the prompt and max tokens
    short = len(said.inner_text())
    shows(page, "#requests_note", "1 running, 0 waiting")
    comes_true(lambda: step(page) > before + 50)
    comes_true(lambda: len(said.inner_text()) > short)  # streamed
    is_seen.set()
    tile_shows(page, "Output", r"[1-9]\d* ?tok/s")
    facts = r"first token after .* · [\d.,]+ tok/s · 100 tokens · prompt \d+, of them \d+ cached · ended by max tokens"
    matches(page, ".message .facts", facts)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    shows(page, "#requests", "none")
    tile_shows(page, "TTFT", r"[\d.]+\s*m?s\s*p50")
    tile_shows(page, "ITL", "p95")
    records = page.evaluate("() => stepHistory.live.steps.reduce((sum, step) => sum + step.decode, 0)")
    assert records >= 99
    ask(page, "And?", max_tokens=3)  # continues the conversation; its prefix is cached
    answered(page, 2)
    cached = re.search(r"prompt (\d+), of them (\d+) cached", page.locator(".message .facts").nth(1).inner_text())
    assert cached is not None
    assert int(cached[1]) > 100
    assert int(cached[2]) >= 16  # a block of the question; a random answer is not tokenised as it was drawn
    tile_shows(page, "Cache hits", r"[1-9]\d* ?%")
    press(page, "New conversation")
    expect(page.locator(".message")).to_have_count(0)
    assert page.evaluate("() => chat.messages.length") == 0


@pytest.mark.full
def test_a_question_that_waits_behind_more_than_are_listed_shows_its_place(open_page):
    with serving(max_num_seqs=1, max_queue=200, max_model_len=1024) as running:
        page = open_page(running.url)
        state(page, "live")
        with slow_steps(running.engine), streaming(running, LONG, 40, running_at_once=1):
            comes_true(lambda: running.stats().num_waiting == 39)
            ask(page, max_tokens=3)
            shown = "() => getComputedStyle(document.querySelector('.message.assistant .said'), '::after').content"
            comes_true(lambda: page.evaluate(shown) == '"Place 40 of 40 in the queue"')
        answered(page, 1)


@pytest.mark.full
def test_stopping_an_answer_frees_the_engine(running, page):
    with slow_steps(running.engine):
        ask(page, max_tokens=900)
        expect(page.locator(".message.assistant .said")).not_to_be_empty()
        press(page, "Stop")
        matches(page, ".message .facts", "stopped$")
    comes_true(running.is_idle)
    ask(page, "Again", max_tokens=2)
    answered(page, 2)


@pytest.mark.full
def test_pausing_holds_all_of_it_still_and_one_goes_back_and_forth_and_to_the_present(running, page):
    with slow_steps(running.engine), streaming(running, LONG):
        comes_true(lambda: step(page) > 60)
        press(page, "Pause")
        state(page, "paused")
        paused = step(page)
        contains(page, "#readout", "steps since the pause")
        assert step(page) == paused
        slider = page.get_by_label("Step shown")
        ids = page.evaluate("() => stepHistory.view.steps.map((step) => step.step)")
        for key, place in (("ArrowLeft", -2), ("ArrowLeft", -3), ("ArrowRight", -2), ("Home", 0), ("ArrowRight", 1)):
            slider.press(key)
            comes_true(lambda place=place: step(page) == ids[place])
        press(page, "One step forth")
        comes_true(lambda: step(page) == ids[2])
        assert "decode" in slider.get_attribute("aria-valuetext")
        # The figures of a past step are those of its record.
        shown = page.evaluate("() => stepHistory.step")
        assert f"{shown['used_blocks']} of 128" in tile(page, "Blocks in use")
        press(page, "Live")
        state(page, "live")
        comes_true(lambda: step(page) > ids[-1])


@pytest.mark.full
def test_a_goal_and_recurrent_states_are_drawn_where_their_figures_are(open_page):
    options = {"max_model_len": 256, "block_size": 64, "num_kv_blocks": 60, "max_num_seqs": 4, "itl_goal": 5.0}
    with serving(model=tiny_class_model("FalconH1ForCausalLM"), **options) as running:
        page = open_page(running.url)
        state(page, "live")
        body = {"model": "tiny", "max_tokens": 20, "extra_body": {"ignore_eos": True}}
        prompts = [[3 + number * 7 % 60 for number in range(length)] for length in (20, 40)]
        running.client().completions.create(prompt=prompts, **body)
        tile_shows(page, "ITL", r"· goal 5(\.00)? s")
        tile_shows(page, "Budget used", r"[\d,]+ by the goal")
        tile_shows(page, "Step time", r"predicted ± [\d.]+ %")
        states = page.locator("#pool_groups .group", has_text="recurrent states")
        expect(states).to_have_text(re.compile(r"\d+ of \d+ in use, \d+ findable"))
        assert page.locator("#pool_groups .group").count() == 2
        assert page.evaluate(UNNAMED) == []


@pytest.mark.full
def test_prefixes_beyond_the_kv_cache_are_drawn_below_its_blocks(open_page, tmp_path):
    options = {"num_kv_blocks": 25, "prefix_cache_host_bytes": 2**26, "prefix_cache_dir": str(tmp_path / "prefixes")}
    with serving(model=str(save_tiny(tmp_path / "model")), max_model_len=160, **options) as running:
        page = open_page(running.url)
        state(page, "live")
        prompts = [list(range(first, first + 110)) for first in range(3, 120, 9)]
        for prompt in [*prompts, prompts[0]]:
            running.client().completions.create(model="tiny", prompt=prompt, max_tokens=2)
        rows = page.locator("#pool_tiers .group")
        shown = (
            r"prefixes in host memory[\d.]+ [KM]iB of 64.0 MiB, \d+ blocks; [1-9]\d* stored, \d+ evicted",
            r"prefixes in files.*of 8.00 GiB; blocks: \d+ written, \d+ read, 0 failed",
            r"prefixes loaded\d+ \([\d,]+ tokens\), \d+ computed as that is faster",
        )
        expect(rows).to_have_text(list(map(re.compile, shown)))
        tiers = running.stats().tiers
        assert tiers.num_loads + tiers.num_recomputes > 0
        comes_true(lambda: page.evaluate("() => stepHistory.newest.tiers.num_loads") == tiers.num_loads)
        assert rows.nth(0).locator("meter").evaluate("(bar) => bar.value") > 0
        assert page.evaluate(UNNAMED) == []


@pytest.mark.full
def test_the_map_the_rows_and_the_bars_have_tooltips(running, page):
    with slow_steps(running.engine), streaming(running, LONG):
        comes_true(lambda: step(page) > 40)
        matches(page, "#pool_legend", r"in use [1-9]")
        press(page, "Pause")
        tip = page.locator("#tip")
        page.locator("#pool").hover(position={"x": 5, "y": 5})
        expect(tip).to_have_text(re.compile(r"block 1: (free|cached|in use|shared)"))
        middle = "(index) => chart.toX((beginOf(chart.view.steps, index) + chart.view.steps[index].time) / 2)"
        count = page.evaluate("() => chart.view.steps.length")
        page.locator("#steps").hover(position={"x": page.evaluate(middle, count - 1), "y": 100})
        last = page.evaluate("() => stepHistory.step")
        expect(tip).to_contain_text(
            f"{last['decode']} decode + {last['prefill']} prefill tokens, {last['cached']} cached"
        )
        expect(tip).to_contain_text("of 128 blocks")
        page.get_by_label("Time shown").select_option("1")
        page.evaluate("() => new Promise(requestAnimationFrame)")
        place = page.evaluate("() => Math.min(chart.range.first + 1, chart.view.steps.length - 1)")
        page.locator("#steps").click(position={"x": page.evaluate(middle, place), "y": 100})
        ids = page.evaluate("() => stepHistory.view.steps.map((step) => step.step)")
        comes_true(lambda: step(page) == ids[place])


@pytest.mark.full
def test_the_colours_on_the_canvases_are_those_of_the_legend(running, open_page):
    page = open_page(running.url, allowed="willReadFrequently")
    page.get_by_label("Time shown").select_option("60")
    ask(page, max_tokens=60)
    answered(page, 1)
    for scheme in ("light", "dark"):
        for canvas, names in (("steps", ["decode", "prefill"]), ("pool", ["cached"]), ("overview", ["decode"])):
            for name in names:
                comes_true(lambda canvas=canvas, name=name: count_pixels(page, canvas, name) > 20)
        if scheme == "light":
            press(page, "Change to dark colours")
            comes_true(lambda: page.evaluate("() => document.documentElement.dataset.theme") == "dark")
    page.reload()  # the choice is kept
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"


def count_pixels(page, canvas, name):
    """Count the pixels of a canvas in a palette colour."""
    return page.evaluate(
        """([id, name]) => {
            const canvas = document.getElementById(id), color = themeColors([name])[name];
            const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            let found = 0;
            for (let at = 0; at < pixels.length; at += 4)
                found += pixels[at] === red && pixels[at + 1] === green && pixels[at + 2] === blue;
            return found;
        }""",
        [canvas, name],
    )


@pytest.mark.full
@pytest.mark.parametrize("size", [NARROW, (820, 1180), WIDE, (2200, 1300)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_narrow_and_wide_screens_in_the_systems_colours(running, open_page, size, scheme):
    page = open_page(running.url, size, scheme)
    state(page, "live")
    assert page.evaluate("() => document.documentElement.dataset.theme") == scheme
    assert page.evaluate("() => document.documentElement.scrollWidth") == size[0]
    outside = page.evaluate(
        """() => [...document.querySelectorAll("header *, button, input, textarea, canvas, h2, .tile, .legend span")]
            .filter((one) => one.offsetWidth && (one.getBoundingClientRect().right > innerWidth
                                                 || one.getBoundingClientRect().left < 0))
            .map((one) => one.id || one.className || one.textContent)"""
    )
    assert outside == []
    if size[0] >= WIDE[0]:  # the page fills the screen and no more
        assert page.evaluate("() => document.documentElement.scrollHeight") == size[1]
        assert page.evaluate(
            "() => document.querySelector('#requests').closest('section').getBoundingClientRect().bottom"
        ) > (0.97 * size[1])


@pytest.mark.full
def test_no_figure_of_a_tile_is_cut_on_a_small_laptop(running, open_page):
    page = open_page(running.url, (1280, 720))
    ask(page, max_tokens=3)
    state(page, "live")
    cut = page.evaluate(
        """() => [...document.querySelectorAll(".tile *")]
            .filter((one) => one.scrollWidth > one.clientWidth && getComputedStyle(one).overflow !== "visible")
            .map((one) => one.textContent)"""
    )
    assert cut == [] and page.locator(".tile .more").count() > 3


@pytest.mark.full
def test_everything_is_reached_and_worked_from_the_keyboard(page):
    ask(page, max_tokens=30)
    answered(page, 1)
    page.reload()
    comes_true(lambda: step(page) > 0)
    reached = []
    for _ in range(26):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.id"))
    wanted = ["theme", "show_list", "new_chat", "conversation", "question", "max_tokens", "temperature", "send",
              "cursor", "pause", "back", "span", "table"]  # fmt: skip
    assert [name for name in reached if name in wanted][: len(wanted)] == wanted
    page.get_by_text("System prompt and sampling").click()
    assert page.evaluate(UNNAMED) == []


@pytest.mark.full
def test_a_key_is_asked_for_until_it_is_right_and_stays_in_the_tab(browser, open_page):
    with serving({"api_key": ("right",)}) as running:
        page = open_page(running.url, allowed="401")
        state(page, "API key needed")
        key = page.locator("#key")
        contains(page, "#key_text", "asks for an API key")
        key.fill("wrong")
        key.press("Enter")
        contains(page, "#key_text", "does not accept this key")
        key.fill("right")
        press(page, "Use it")
        state(page, "live")
        expect(page.locator("#key_dialog")).to_be_hidden()
        ask(page, max_tokens=3)
        answered(page, 1)
        assert "right" not in page.url
        assert "right" not in page.evaluate("() => JSON.stringify(localStorage) + document.cookie")
        page.get_by_role("link", name="Metrics").click()  # which sends the key too
        contains(page, "#text", "nanovllm:")
        press(page, "Close")
        page.reload()
        state(page, "live")
        other = page.context.new_page()  # another tab lacks it
        other.goto(running.url)
        state(other, "API key needed")


@pytest.mark.full
def test_a_full_queue_and_a_refused_question_are_shown_and_may_be_asked_again(open_page):
    with serving(max_num_seqs=1, max_queue=0, max_model_len=1024) as running:
        page = open_page(running.url, allowed="429|400")
        state(page, "live")
        with slow_steps(running.engine), streaming(running, LONG):
            ask(page)
            matches(page, ".message .failure", "queue is full.*Try again in 1 s")
            expect(question(page)).to_have_value(QUESTION)
        question(page).press("Enter")
        answered(page, 1)
        ask(page, "long " * 3000)
        contains(page, ".message .failure", "max_model_len")


@pytest.mark.full
def test_a_dead_engine_and_a_server_that_is_gone_are_shown(open_page):
    with serving() as running:
        page = open_page(running.url, allowed="503|ERR_|INCOMPLETE")
        state(page, "live")
        with slow_steps(running.engine):
            ask(page, max_tokens=400)
            expect(page.locator(".message.assistant .said")).not_to_be_empty()
            running.engine._engine_thread._engine.step = lambda: 1 / 0
        state(page, "engine dead")
        contains(page, "#notice", "engine has died")
        expect(page.locator(".message .failure")).not_to_be_empty()
        running.thread.join(30.0)
        contains(page, "#notice", "and the server with it")
        state(page, "engine dead")
        press(page, "Pause")  # its last steps can still be read
        page.get_by_label("Step shown").press("ArrowLeft")
        assert step(page) > 0


@pytest.mark.full
def test_a_server_that_comes_back_is_found(open_page):
    with serving() as first:
        page = open_page(first.url, allowed="503|ERR_|INCOMPLETE")
        state(page, "live")
        port = first.address[1]
    state(page, "not connected")
    with serving({"port": port}) as second:
        state(page, "live")
        ask(page, max_tokens=3)
        answered(page, 1)
        comes_true(second.is_idle)
