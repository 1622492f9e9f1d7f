"""Pictures of the live view and of a timeline from real runs: `python -m bench.machines.page_pictures docs/images`

The live view: a server of the embedded model, clients, and a page that asks it something. The timeline: prompts with a
common beginning, offline, in a pool that is too small for all. Both in light and dark, in headless Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from nanovllm.model.default_model import DEFAULT_MODEL

SIZE = {"width": 1440, "height": 900}
COMMAND = [sys.executable, "-m", "nanovllm.cli"]
OPTIONS = ["--dtype", "bfloat16", "--block-size", "16", "--max-num-batched-tokens", "128", "--max-model-len", "512"]
COMMON = (
    "You are a helpful assistant of a small library. Answer in plain words, name your sources where you have any, and "
    "say so where you do not know. The library has books on trees, rivers, towns, ships and the weather, and is open "
    "from nine to five. "
)
FILLER = "It was seen from the hill in the morning, and again in the evening, by those who came home. "
TOPICS = ["a tree", "a river", "a town", "a ship", "the weather", "a lamp", "a mountain", "a market", "a letter"]
QUESTION = "Write a Python function that greets a person by name. Explain it in a list."
SYSTEM = "Answer in Markdown."


def prompts(count: int) -> list[str]:
    """Prompts of 70 to 300 tokens."""
    topics = [TOPICS[number % len(TOPICS)] for number in range(count)]
    return [f"{COMMON}Tell me a long story about {topic}. {FILLER * (3 * i % 10)}" for i, topic in enumerate(topics)]


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server of the embedded model; yields its address."""
    command = [*COMMAND, "serve", "--port", "0", "--num-kv-blocks", "200", *OPTIONS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"running on (\S+)", line):
                break
        else:
            raise SystemExit("the server did not start.")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


def keep_asking(url: str, number: int, is_over: threading.Event) -> None:
    """A client that asks one prompt after another."""
    own = prompts(40)[number::6]
    for turn in range(1000):
        messages = [{"role": "user", "content": own[turn % len(own)]}]
        body = {"messages": messages, "max_completion_tokens": 30 + 20 * (turn % 4), "seed": turn}
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"Content-Type": "application/json"})
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()
        if is_over.is_set():
            return


def picture(page: Page, path: Path) -> None:
    """A screenshot of 256 colours, with the pointer away."""
    page.mouse.move(0, 0)
    page.screenshot(path=path)
    palette = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    palette.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


def in_both_themes(page: Page, folder: Path, name: str) -> None:
    picture(page, folder / f"{name}_light.png")
    page.get_by_role("button", name="Change to dark colours").click()
    page.wait_for_timeout(300)
    picture(page, folder / f"{name}_dark.png")


def draw_live_view(browser: Browser, folder: Path) -> None:
    is_over = threading.Event()
    with server() as url:
        clients = [threading.Thread(target=keep_asking, args=(url, number, is_over)) for number in range(6)]
        for client in clients:
            client.start()
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(url)
        page.get_by_label("Time shown").select_option("60")
        page.get_by_text("System prompt and sampling").click()
        page.get_by_label("System prompt", exact=True).fill(SYSTEM)
        page.get_by_text("System prompt and sampling").click()
        for name, value in (("Max tokens", "110"), ("Temperature", "0")):
            page.get_by_label(name).fill(value)
        page.get_by_label("Message", exact=True).fill(QUESTION)
        page.get_by_label("Message", exact=True).press("Enter")
        page.locator(".message .facts").wait_for(timeout=600_000)
        page.wait_for_timeout(5_000)
        page.evaluate("() => { $('conversation').scrollTop = 0; document.activeElement.blur(); }")
        in_both_themes(page, folder, "live_view")
        page.close()
        is_over.set()
        for client in clients:
            client.join()


def draw_timeline(browser: Browser, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        file, trace, html = (Path(work) / name for name in ("prompts.jsonl", "run.json", "run.html"))
        lines = [{"prompt": text, "max_tokens": 15 + 10 * (number % 4)} for number, text in enumerate(prompts(24))]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        limits = ["--max-num-seqs", "8", "--num-kv-blocks", "64"]
        generate = [
            *COMMAND,
            "generate",
            "--file",
            str(file),
            "--trace",
            str(trace),
            "--temperature",
            "0",
            *OPTIONS,
            *limits,
        ]
        subprocess.run(generate, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*COMMAND, "timeline", str(trace), "-o", str(html)], check=True)
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(html.as_uri())
        # The step with most requests among those with a chunk in the middle of the run.
        page.evaluate(
            """() => {
                const steps = charts[0].run.steps, value = (step, name) => step[COLUMN[name]];
                const amount = (step) => (value(step, "prefill") > 1 ? value(step, "sequences") : 0);
                const some = steps.map((step, index) => [step, index]).slice(steps.length / 3, 2 * steps.length / 3);
                pinned.pin(charts[0], some.reduce((best, one) => (amount(one[0]) > amount(best[0]) ? one : best))[1]);
            }"""
        )
        page.wait_for_timeout(300)
        in_both_themes(page, folder, "timeline")
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no Chromium found; Debian's package is `chromium`.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        draw_timeline(browser, folder)
        draw_live_view(browser, folder)
        browser.close()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    print(f"{DEFAULT_MODEL} on {psutil.cpu_count()} cores of {', '.join(names) or platform.machine()}")


if __name__ == "__main__":
    main()
