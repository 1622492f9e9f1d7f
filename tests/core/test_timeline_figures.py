"""A timeline's figures are the engine's own metrics; its page searches, pins steps, compares runs and takes touch."""

import re
from collections import Counter

import numpy as np
import pytest
from playwright.sync_api import expect

from nanovllm import TraceWriter
from nanovllm.cli.main import main
from nanovllm.observability.timeline import STEP_VALUES, read_trace
from nanovllm.observability.timeline_figures import RunFigures
from tests.support import traces
from tests.support.live_pages import UNNAMED, live_pages
from tests.support.llms import generate, greedy, open_llm
from tests.support.tiny_models import random_prompts, tiny_model

# A pool that is too small for three, and a budget that cuts prompts into chunks.
OPTIONS = {"num_kv_blocks": 14, "max_model_len": 160, "max_num_seqs": 3, "max_num_batched_tokens": 32}


def record(path, **options):
    """Trace requests that are cut into chunks, find a cached prefix, and preempt each other."""
    with TraceWriter(path) as trace, open_llm(tiny_model(), trace=trace, **OPTIONS | options) as llm:
        prompts = random_prompts(4, low=40, high=50)
        return generate(llm, [*prompts, prompts[0]], [greedy(count) for count in (60, 60, 1, 60, 25)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two traces, and their pages: one.html and both.html."""
    folder = tmp_path_factory.mktemp("figures")
    record(folder / "small.json")
    record(folder / "large.json", num_kv_blocks=40)
    paths = [str(folder / name) for name in ("small.json", "large.json")]
    assert main(["timeline", paths[0], "-o", str(folder / "one.html")]) == 0
    assert main(["timeline", *paths, "-o", str(folder / "both.html")]) == 0
    return folder


@pytest.fixture
def open_page(browser):
    with live_pages(browser) as open_page:
        yield open_page


# ------------------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("overlap", [False, True])
def test_the_figures_of_each_request_are_its_metrics(tmp_path, overlap):
    outputs = record(tmp_path / "run.json", overlap=overlap, record_itl=True)
    run = read_trace(tmp_path / "run.json")
    figures = RunFigures(run)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    # A step's metrics are taken within its update, its record after it.
    slack = 10 + max(step[2 + STEP_VALUES.index("update_us")] for step in run.steps)
    gaps = []
    for lane, found, output in zip(run.lanes, figures.requests, outputs, strict=True):
        metrics = output.metrics
        assert len(figures._token_times(lane, found.prompt)) == metrics.num_output_tokens
        assert found.reason == output.outputs[0].finish_reason
        assert (found.prompt, found.cached) == (metrics.num_prompt_tokens, metrics.num_cached_tokens)
        assert (found.output, found.preemptions) == (metrics.num_output_tokens, metrics.num_preemptions)
        near = lambda seconds: pytest.approx(1e6 * seconds, abs=slack)  # noqa: E731
        queue = 1e6 * (metrics.scheduled_time - metrics.arrival_time)
        assert queue - 10 <= found.queue <= found.ttft
        assert overlap or found.queue <= queue + slack  # else the device may begin with a step long after its launch
        assert found.ttft == near(metrics.first_token_time - metrics.arrival_time)
        assert found.latency == near(metrics.finished_time - metrics.arrival_time)
        assert found.itl == (None if metrics.num_output_tokens == 1 else near(metrics.mean_itl))
        gaps += metrics.itls
    itl = figures.percentiles["itl"]
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert itl[name] == pytest.approx(1e6 * np.percentile(gaps, share), abs=slack)
    assert itl["max"] == pytest.approx(1e6 * max(gaps), abs=slack)


@pytest.mark.parametrize("at", [0.3, 0.6, 0.95])
def test_a_trace_that_was_cut_short_has_figures_of_what_it_holds(folder, tmp_path, at):
    text = (folder / "small.json").read_text(encoding="utf-8")
    (tmp_path / "short.json").write_text(text[: int(len(text) * at)], encoding="utf-8")
    whole, short = RunFigures(read_trace(folder / "small.json")), RunFigures(read_trace(tmp_path / "short.json"))
    assert 0 < len(short.requests) <= len(whole.requests)
    for found, full in zip(short.requests, whole.requests, strict=False):
        assert found.ttft in (None, full.ttft)
        assert found.output <= full.output
        assert found.latency == (None if found.reason == "unfinished" else full.latency)
    assert any(found.reason == "unfinished" for found in short.requests)


def test_the_command_prints_percentiles_and_names_what_it_cannot_draw(folder, tmp_path, capsys):
    small, large = str(folder / "small.json"), str(folder / "large.json")
    assert main(["timeline", small, large, "-o", str(tmp_path / "both.html")]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.endswith(":")] == ["small.json:", "large.json:"]
    assert len(re.findall(r"^TTFT +(?:[\d,.]+ ms *){5}$", printed, re.MULTILINE)) == 2
    assert main(["timeline", small, large, "--plot", str(tmp_path / "run.png")]) == 2
    assert "-o run.html" in capsys.readouterr().err
    assert main(["timeline", small, small, "-o", str(tmp_path / "twice.html")]) == 0
    assert f"{small} (2):" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------- page


def settled(page):
    page.evaluate("() => new Promise(requestAnimationFrame)")


def test_a_click_pins_a_step_and_shows_the_chunks_and_requests_that_it_computed(folder, open_page):
    page = open_page((folder / "one.html").as_uri())
    trace, run = traces.read(folder / "small.json"), read_trace(folder / "small.json")
    chunks = Counter()
    for spans in trace.lanes.values():
        chunks.update(span.arguments["step"] for span in spans if span.state == "prefill")
    number, _ = chunks.most_common(1)[0]
    index = next(at for at, step in enumerate(trace.steps) if step["step"] == number)
    # To be wide enough to click, the step fills a third of the chart.
    start, end, *_ = run.steps[index]
    page.evaluate("([start, span]) => { show(start - span, 3 * span); draw(); }", [start, max(17, end - start)])
    box = page.locator("canvas").bounding_box()
    middle = page.evaluate("(time) => charts[0].toX(time)", (start + end) / 2)
    page.mouse.click(box["x"] + middle, box["y"] + page.evaluate("() => charts[0].height - BLOCKS / 2"))
    expect(page.locator("#pinned_title")).to_have_text(f"Step {number}")
    for place in range(len(run.steps)):  # every step: its decodes are those that the trace counts
        work = page.evaluate(
            """(index) => { const {chunks, decodes} = workOf(runs[0], index);
                            return [chunks.map(([lane, {start, tokens}]) => [lane.name, start, tokens]),
                                    decodes.map(({name}) => name)]; }""",
            place,
        )
        step = trace.steps[place]
        wanted = [
            [trace.names[lane], span.arguments["start"], span.arguments["tokens"]]
            for lane, spans in trace.lanes.items()
            for span in spans
            if span.state == "prefill" and span.arguments["step"] == step["step"]
        ]
        assert work[0] == wanted
        assert len(work[0]) + len(work[1]) == step["sequences"]
        assert sum(tokens for _, _, tokens in work[0]) + len(work[1]) == step["decode"] + step["prefill"]
    shown = page.locator("#pinned_body")
    for spans in trace.lanes.values():
        for span in spans:
            if span.state == "prefill" and span.arguments["step"] == number:
                expect(shown).to_contain_text(f"{span.arguments['tokens']} tokens from {span.arguments['start']}")
    page.get_by_role("button", name=re.compile("^step")).click()
    expect(page.locator("#pinned_title")).to_have_text(f"Step {trace.steps[index + 1]['step']}")
    page.locator("canvas").press(",")
    expect(page.locator("#pinned_title")).to_have_text(f"Step {number}")
    shown.get_by_role("button").first.click()  # shows that request
    assert page.evaluate("() => charts[0].chosen.name") == shown.get_by_role("button").first.inner_text()
    page.locator("canvas").press("Escape")
    expect(page.locator("#pinned")).to_be_hidden()


def test_requests_are_searched_and_sorted_and_one_is_shown(folder, open_page):
    page, figures = open_page((folder / "one.html").as_uri()), RunFigures(read_trace(folder / "small.json"))
    rows = page.locator("#requests tbody tr")
    expect(rows).to_have_count(5)
    page.get_by_role("button", name="TTFT").click()
    by_ttft = sorted(figures.requests, key=lambda request: -(request.ttft or 0))
    expect(rows.locator("td:first-child")).to_have_text([request.name for request in by_ttft])
    assert page.locator("#requests th[aria-sort=descending]").inner_text().startswith("TTFT")
    page.get_by_label("Search").fill(by_ttft[0].name)
    expect(rows).to_have_count(1)
    expect(page.locator("#found")).to_have_text("1 of 5")
    rows.get_by_role("button").press("Enter")
    settled(page)
    expect(rows.get_by_role("button")).to_be_focused()
    expect(rows).to_have_class("chosen")
    start, end = page.evaluate("() => [view.start, view.end]")
    assert start <= by_ttft[0].arrival
    assert end - start < 1.2 * (by_ttft[0].latency or 0)
    page.get_by_label("Search").fill("no such")
    expect(rows).to_have_count(0)


def test_two_runs_share_an_axis_and_their_percentiles_stand_together(folder, open_page):
    page = open_page((folder / "both.html").as_uri())
    first, second = (RunFigures(read_trace(folder / name)) for name in ("small.json", "large.json"))
    expect(page.locator(".run h2")).to_have_text(["small.json", "large.json"])
    cells = page.locator("#percentiles tbody tr").nth(2).locator("td")
    share = second.percentiles["ttft"]["p50"] / first.percentiles["ttft"]["p50"]
    expect(cells.nth(3)).to_have_text(re.compile(f"{share:.2f}$"))
    page.locator("canvas").nth(1).press("+")
    settled(page)
    spans = page.evaluate("() => charts.map((chart) => [chart.toTime(LABELS), chart.toTime(chart.width - RIGHT)])")
    assert spans[0] == pytest.approx(spans[1])
    assert page.evaluate("() => charts[0].scale.most === charts[1].scale.most")
    boxes = [page.locator("canvas").nth(place).bounding_box() for place in range(2)]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    page.locator("canvas").nth(1).press("Enter")
    expect(page.locator("#pinned_title")).to_contain_text("of large.json")


@pytest.mark.parametrize("size", [(360, 740), (820, 1180), (1440, 900), (2200, 1300)])
def test_the_page_fits_the_screen_and_everything_has_a_name(folder, open_page, size):
    page = open_page((folder / "both.html").as_uri(), size, "dark")
    assert page.evaluate("() => document.documentElement.scrollWidth") == size[0]
    page.evaluate("() => { view.start = view.end - 1; }")
    for canvas in page.locator("canvas").all():  # one run has ended by then
        canvas.press("Enter")
        expect(page.locator("#pinned")).to_be_visible()
        canvas.press("Escape")
        expect(page.locator("#pinned")).to_be_hidden()
    page.locator("canvas").first.press("Enter")
    assert page.evaluate("() => document.documentElement.scrollWidth") == size[0]
    assert page.evaluate(UNNAMED) == []


def test_one_finger_moves_two_zoom_and_a_tap_pins(folder, browser):
    context = browser.new_context(viewport={"width": 820, "height": 1180}, has_touch=True)
    page = context.new_page()
    page.goto((folder / "one.html").as_uri())
    box = page.locator("canvas").bounding_box()
    touches = context.new_cdp_session(page)

    def touch(kind, *places):
        points = [{"x": box["x"] + x, "y": box["y"] + 200, "id": number} for number, x in enumerate(places)]
        touches.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})

    times = page.evaluate("() => [charts[0].toTime(300), charts[0].toTime(500)]")
    touch("Start", 300)
    touch("Start", 300, 500)
    for step in range(1, 6):
        touch("Move", 300 - 20 * step, 500 + 30 * step)
    touch("End")
    settled(page)
    # What was under the fingers still is.
    assert page.evaluate("() => [charts[0].toTime(200), charts[0].toTime(650)]") == pytest.approx(times, rel=0.02)
    before = page.evaluate("() => view.start")
    touch("Start", 500)
    for x in (480, 440, 400):
        touch("Move", x)
    touch("End")
    settled(page)
    assert page.evaluate("() => view.start") > before
    expect(page.locator("#pinned")).to_be_hidden()
    # Between two steps a tap pins nothing, and a busy machine leaves more room there.
    inside = page.evaluate(
        "() => charts[0].run.steps.map((step) => charts[0].toX((step[START] + step[END]) / 2))"
        ".find((x) => x > LABELS + 20 && x < charts[0].width - 20)"
    )
    page.touchscreen.tap(box["x"] + inside, box["y"] + 200)
    expect(page.locator("#pinned")).to_be_visible()
    context.close()
