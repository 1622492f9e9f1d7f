"""The live view's feed: correct figures, no prompt or answer text, and snapshots only for watchers."""

import asyncio
import base64
import json
import re
import time
from collections import deque
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest

from nanovllm import SamplingParams, StepRecord
from nanovllm.errors import EngineClosedError, EngineDeadError
from nanovllm.features.engine_stats import CacheGroupStats
from nanovllm.features.speculation import lengths
from nanovllm.observability.step_records import RECENT_STEPS
from nanovllm.serving.server.live import live_feed
from nanovllm.serving.server.live.engine_snapshot import (
    MAX_CELLS,
    MAX_ROWS,
    REQUEST_VALUES,
    STEP_VALUES,
    EngineSnapshot,
    group_rows,
    pool_map,
    pool_usage,
    step_row,
    take_snapshot,
    with_queue_positions,
)
from nanovllm.serving.server.live.live_feed import MAX_WATCHERS, LiveFeed
from nanovllm.serving.server.live.live_view import live_page
from tests.engine.blocks import SIZE, A, B, computed, make_manager, release
from tests.support.async_llms import OPTIONS, collect, in_engine_steps, open_llm
from tests.support.llms import comes_true
from tests.support.public_options import make_sequence
from tests.support.scheduling import make_scheduler
from tests.support.serving import serving
from tests.support.tiny_models import tiny_tokenizer

ENDLESS = SamplingParams(temperature=0.0, max_tokens=400)


def parsed(data):
    found = re.fullmatch(r"event: (\w+)\ndata: (.*)\n\n", data.decode())
    assert found is not None, data
    content = json.loads(found[2])
    if found[1] == "hello":
        assert content.pop("uptime_us") >= 0
    return found[1], content


async def take(feed, number):
    """Return the first messages of a new watcher."""
    messages = []
    async with aclosing(feed.watch()) as watch:
        async for data in watch:
            messages.append(parsed(data))
            if len(messages) == number:
                break
    return messages


def rows(look):
    return [dict(zip(REQUEST_VALUES, row, strict=True)) for row in look["requests"]]


def build_step(step_id):
    return StepRecord(step_id, float(step_id), step_id - 0.5, 1, 1, 0, 0, 1, 0, 1, 0.0, 0.0, 0.0, 0.0, ())


EMPTY = EngineSnapshot(0.0, (), [], 0, 0, bytes(5), bytes(5), {}, 0.0)


class StillEngine:
    """An engine driven by the test, which counts its inspections."""

    def __init__(self):
        self.num_looks = 0
        self.steps = []
        self.pool = (bytes(5), bytes(5))
        self.error = None

    async def inspect(self, look):
        self.num_looks += 1
        if self.error is not None:
            raise self.error
        return EngineSnapshot(0.0, tuple(self.steps), [], 0, 0, *self.pool, {}, 0.0)


@pytest.fixture
def still(monkeypatch):
    monkeypatch.setattr(live_feed, "INTERVAL_SECONDS", 0.001)
    monkeypatch.setattr(live_feed, "IDLE_SECONDS", 0.01)
    return StillEngine()


# ------------------------------------------------------------------------------------------------------------ snapshots


async def test_a_snapshot_has_running_and_waiting_requests_and_their_progress(monkeypatch):
    steps = deque(maxlen=RECENT_STEPS)
    async with open_llm(on_step=steps.append, max_num_seqs=2) as llm:
        in_engine_steps(llm, monkeypatch, lambda _: time.sleep(0.01))  # no answer ends by itself
        streams = [llm.generate([7] * 40, ENDLESS, request_id=name) for name in "abc"]
        for stream in streams[:2]:
            await anext(stream)
        waiting = asyncio.ensure_future(anext(streams[2]))
        await asyncio.sleep(0.05)
        snapshot = await llm.inspect(lambda engine: take_snapshot(engine, steps))
        stats = await llm.stats()
        waiting.cancel()
    assert (snapshot.num_running, snapshot.num_waiting) == (2, 1)
    first, second, third = found = rows({"requests": snapshot.requests})
    assert [(row["id"], row["state"]) for row in found] == [("a", "decode"), ("b", "decode"), ("c", "waiting")]
    for row in (first, second):
        assert (row["prompt"], row["known"] - row["computed"], row["limit"]) == (40, 1, 440)
    assert (second["cached"], third["computed"], third["known"]) == (32, 0, 40)
    assert first["age_us"] >= second["age_us"] >= third["age_us"] > 0
    total = pool_map(snapshot.num_holders, snapshot.findable)["total"]
    assert total[3] == 2 and sum(total) == OPTIONS["num_kv_blocks"] - 1
    assert snapshot.counters["output_tokens"] <= stats.num_output_tokens
    assert snapshot.steps[-1].num_used_blocks == total[2] + total[3]


async def test_a_snapshot_has_drafts_by_source_and_the_feed_their_accepted_tokens(monkeypatch):
    monkeypatch.setattr(lengths, "PLAIN_WINDOW", 10**9)  # drafts never rest
    steps = deque(maxlen=RECENT_STEPS)
    params = SamplingParams(temperature=0.0, max_tokens=30)
    async with open_llm(on_step=steps.append, speculation="suffix") as llm:
        for _ in "first", "drafted from the first":
            await collect(llm.generate([7] * 40, params))
        snapshot = await llm.inspect(lambda engine: take_snapshot(engine, steps))
        stats = await llm.stats()
    assert snapshot.drafts == stats.speculation.by_source and snapshot.drafts["suffix"][1] > 20
    rows_of_steps = [dict(zip(STEP_VALUES, step_row(record, 0.0), strict=True)) for record in steps]
    assert sum(row["accepted"] for row in rows_of_steps) == stats.speculation.num_accepted_tokens
    assert any("drafts accepted" in row["groups"] for row in rows_of_steps)


@asynccontextmanager
async def queue_behind_one(monkeypatch, names):
    """An engine that runs the first of these requests while the others wait."""
    async with open_llm(max_num_seqs=1) as llm:
        in_engine_steps(llm, monkeypatch, lambda _: time.sleep(0.01))  # no answer ends by itself
        tasks = [asyncio.ensure_future(anext(llm.generate([7] * 4, ENDLESS, request_id=name))) for name in names]
        await tasks[0]
        while (await llm.stats()).num_waiting < len(names) - 1:
            await asyncio.sleep(0.01)
        yield llm
        for task in tasks:
            task.cancel()


async def test_a_snapshot_of_many_requests_has_some_rows_and_the_count_of_all(monkeypatch):
    async with queue_behind_one(monkeypatch, [f"{n}" * 100 for n in range(10, 10 + MAX_ROWS + 5)]) as llm:
        snapshot = await llm.inspect(lambda engine: take_snapshot(engine, deque()))
    assert (snapshot.num_running, snapshot.num_waiting) == (1, MAX_ROWS + 4)
    assert len(snapshot.requests) == 1 + MAX_ROWS
    assert all(len(row["id"]) == 64 for row in rows({"requests": snapshot.requests}))


async def test_a_waiting_question_of_a_page_has_its_place_among_all_that_wait(monkeypatch):
    ids = [str(number) for number in range(MAX_ROWS + 5)]
    questions = {ids[0]: "live-runs", ids[-1]: "live-last", ids[3]: "live-third", "gone": "live-gone"}
    async with queue_behind_one(monkeypatch, ids) as llm:
        look = await llm.inspect(lambda engine: with_queue_positions(take_snapshot(engine, deque()), engine, questions))
    assert look.queue_positions == {"live-third": 3, "live-last": len(ids) - 1}


def test_groups_are_those_of_the_last_step_and_none_if_there_is_one_pool():
    full = CacheGroupStats(None, None, 40, 7, 9, 0)
    states = CacheGroupStats(None, None, 8, 2, 3, 0, record_bytes=64)
    steps = [build_step(1), replace(build_step(2), cache_groups=(full, states))]
    assert group_rows(steps) == [("full attention", 7, 9, 40), ("recurrent states", 2, 3, 8)]
    assert group_rows(steps[:1]) == group_rows([replace(steps[1], cache_groups=(full,))]) == group_rows([]) == []


def test_positions_follow_the_shares_of_clients():
    scheduler = make_scheduler(max_num_seqs=1)
    for number, client in enumerate("aaab"):
        scheduler.add(make_sequence([1, 2], arrival=number, client=client))
    scheduler.schedule()
    engine = SimpleNamespace(statuses=(), scheduler=scheduler)
    positions = with_queue_positions(EMPTY, engine, {"2": "live-a", "3": "live-b"}).queue_positions
    assert positions == {"live-b": 1, "live-a": 3}
    scheduler.running[0].account.served += 2 * scheduler.waiting.bound  # Its client starts nothing for a while
    assert [sequence.request_id for sequence in scheduler.waiting.startable()] == ["3"]
    assert with_queue_positions(EMPTY, engine, {"2": "live-a"}).queue_positions == {"live-a": 3}


def test_of_replicas_a_question_without_a_token_has_its_place_in_the_order_of_arrival():
    def request(*samples):
        new = SimpleNamespace(params=SimpleNamespace(n=len(samples)))
        return SimpleNamespace(new=new, samples=[SimpleNamespace(token_ids=token_ids) for token_ids in samples])

    requests = {"a": request([1]), "b": request([], []), "c": request([])}
    pool = SimpleNamespace(statuses=["up"], requests=requests)
    assert with_queue_positions(EMPTY, pool, {"a": "live-a", "c": "live-c"}).queue_positions == {"live-c": 3}


@pytest.mark.parametrize("num_blocks", [1, 13, MAX_CELLS, MAX_CELLS + 1, 3 * MAX_CELLS - 1, 100_000])
def test_the_map_counts_every_block_once_whatever_the_size_of_the_pool(num_blocks):
    random = np.random.default_rng(num_blocks)
    holders = random.choice([0, 0, 1, 2, 255], num_blocks + 1).astype(np.uint8)
    findable = random.integers(0, 2, num_blocks + 1).astype(np.uint8)
    holders[0], findable[0] = 1, 1  # the null block does not count
    made = pool_map(holders.tobytes(), findable.tobytes())
    cells = np.frombuffer(base64.b64decode(made["cells"]), "<u2").reshape(-1, 3)
    per = made["blocks_per_cell"]
    assert len(cells) == -(-num_blocks // per) <= MAX_CELLS
    kinds = np.select([holders == 1, holders > 1, findable == 1], [1, 2, 0], 3)[1:]
    expected = [np.add.reduceat(kinds == kind, range(0, num_blocks, per), dtype=int) for kind in range(3)]
    assert cells.T.tolist() == np.array(expected).tolist()
    assert made["total"][1:] == cells.sum(axis=0).tolist() and sum(made["total"]) == num_blocks


# ----------------------------------------------------------------------------------------------------------------- feed


async def test_a_watcher_gets_the_recent_steps_and_then_the_new_ones(still):
    feed = LiveFeed(still, {"model": "x"})
    still.steps = [build_step(1), build_step(2)]
    async with aclosing(feed.watch()) as watch:
        assert parsed(await anext(watch)) == ("hello", {"model": "x"})
        name, look = parsed(await anext(watch))
        assert name == "look" and step_ids(look) == [1, 2]
        assert dict(zip(STEP_VALUES, look["steps"][1], strict=True))["time"] == 2_000_000
        assert look["pool"]["total"] == [4, 0, 0, 0]
        still.steps = [*still.steps, build_step(5)]
        while not (look := parsed(await anext(watch))[1])["steps"]:
            assert look["pool"] is None  # unchanged
        assert step_ids(look) == [5]
        still.pool = (bytes([0, 1, 2, 0, 0]), bytes([0, 0, 0, 1, 0]))
        while (look := parsed(await anext(watch))[1])["pool"] is None:
            assert look["steps"] == []
        assert look["pool"]["total"] == [1, 1, 1, 1]


def step_ids(look):
    return [row[0] for row in look["steps"]]


async def test_no_snapshot_is_taken_after_the_last_watcher_has_gone(still):
    feed = LiveFeed(still, {})
    assert still.num_looks == 0
    for _ in range(2):
        await take(feed, 3)
        await asyncio.sleep(0.05)  # the snapshot that was under way
        looks = still.num_looks
        await asyncio.sleep(0.05)
        assert still.num_looks == looks
    assert feed._latest is None
    assert feed._task is not None and feed._task.done()


async def test_a_slow_watcher_skips_looks_and_misses_no_step(still):
    feed = LiveFeed(still, {})
    async with aclosing(feed.watch()) as slow, aclosing(feed.watch()) as quick:
        watches = {slow: [], quick: []}

        async def look(watch):
            watches[watch] += step_ids(parsed(await anext(watch))[1])

        for watch in watches:
            await anext(watch)
        for number in range(1, 60):
            still.steps = [*still.steps, build_step(number)]
            await look(quick)
            if number % 20 == 0:
                await look(slow)
        for watch, seen in watches.items():
            while len(seen) < 59:
                await look(watch)
            assert seen == list(range(1, 60))


async def test_a_watcher_hears_that_the_connection_lives_while_a_step_is_long(still, monkeypatch):
    monkeypatch.setattr(live_feed, "KEEP_ALIVE_SECONDS", 0.01)
    monkeypatch.setattr(still, "inspect", lambda look: asyncio.sleep(60))
    feed = LiveFeed(still, {})
    async with aclosing(feed.watch()) as watch:
        assert parsed(await anext(watch))[0] == "hello"
        for _ in range(3):
            assert (await anext(watch)).startswith(b": ")


async def test_looks_become_rarer_if_they_are_dear(still, monkeypatch):
    sleep = asyncio.sleep
    waits = []

    async def sleeps(seconds):
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(live_feed.asyncio, "sleep", sleeps)
    monkeypatch.setattr(still, "inspect", AsyncMock(return_value=replace(EMPTY, seconds=0.025)))
    await take(LiveFeed(still, {}), 2)
    assert waits[0] == 2.5  # 1 % of the time


def test_steps_are_kept_up_to_a_thousand_and_nothing_else_is(still):
    feed = LiveFeed(still, {})
    for number in range(3 * RECENT_STEPS):
        feed.on_step(build_step(number))
    assert len(feed._steps) == RECENT_STEPS
    assert feed._steps[-1].step_id == 3 * RECENT_STEPS - 1


@pytest.mark.parametrize(
    "fails, reason",
    [("die", "dead"), ("close", "closed"), ("look", "failed")],
)
async def test_present_and_later_watchers_get_the_reason_of_the_end(fails, reason, monkeypatch):
    llm = open_llm()
    feed = LiveFeed(llm, {})
    async with aclosing(feed.watch()) as watch:
        assert [parsed(await anext(watch))[0] for _ in range(2)] == ["hello", "look"]
        if fails == "die":
            monkeypatch.setattr(llm._engine_thread._engine, "step", lambda: 1 / 0)
            with pytest.raises(RuntimeError):
                await anext(llm.generate([7], ENDLESS))
        elif fails == "close":
            await llm.close()
        else:
            monkeypatch.setattr(live_feed, "take_snapshot", lambda engine, steps: 1 / 0)
        names = [parsed(data) async for data in watch]
    assert names[-1] == ("end", {"reason": reason})
    assert await take(feed, 2) == [("hello", {}), ("end", {"reason": reason})]
    await llm.close()


@pytest.mark.parametrize("error, reason", [(EngineDeadError("dead"), "dead"), (EngineClosedError("closed"), "closed")])
async def test_watchers_get_the_last_steps_of_an_engine_though_no_snapshot_follows(error, reason):
    engine = StillEngine()
    engine.steps = [build_step(3)]
    feed = LiveFeed(engine, {})
    feed.on_step(build_step(3))
    async with aclosing(feed.watch()) as watch:
        looks = [parsed(await anext(watch)) for _ in range(2)]
        for step_id in (4, 5):
            feed.on_step(build_step(step_id))
        engine.error = error
        looks += [parsed(data) async for data in watch]
    assert [step_ids(data) for name, data in looks if name == "look" and data["steps"]] == [[3], [4, 5]]
    assert looks[-1] == ("end", {"reason": reason})


# --------------------------------------------------------------------------------------------------------------- server


def refusal(running, path, headers=None):
    """Return status and code of a refusal; a feed would never end."""
    with running.http() as http, http.stream("GET", path, headers=headers) as answer:
        assert answer.headers["content-type"] == "application/json"
        answer.read()
        return answer.status_code, answer.json()["error"]["code"]


def test_no_prompt_and_no_answer_is_in_the_feed():
    secret, salt = "Whoever reads this knows too much", "saltofmine"
    with serving() as running, running.http() as http, http.stream("GET", "/ui/events") as feed:
        body = {"prompt": secret, "max_tokens": 200, "stream": True, "seed": 1, "user": "someone"}
        with http.stream("POST", "/v1/completions", json=body | {"cache_salt": salt}) as answer:
            chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        received = ""
        for line in feed.iter_lines():
            received += line + "\n"
            if '"output_tokens":200' in line:
                break
    assert len(text) > 100
    for word in [secret, salt, "Whoever", "someone", text[:10], text[-10:], json.dumps(text[:10])[1:-1]]:
        assert word not in received
    ids = tiny_tokenizer().encode(secret)
    assert len(ids) > 3
    assert ",".join(map(str, ids[:3])) not in received
    assert '"decode",' in received  # the request is in the feed


def test_with_a_key_the_page_is_open_and_what_it_shows_is_not():
    with serving({"api_key": ("right",)}) as running, running.http() as http:
        assert http.get("/").status_code == 200
        for path, headers in (
            ("/ui/events", {}),
            ("/ui/events", {"Authorization": "Bearer wrong"}),
            ("/ui/events?key=right&api_key=right", {}),
        ):
            assert refusal(running, path, headers) == (401, "invalid_api_key")
        with http.stream("GET", "/ui/events", headers={"Authorization": "Bearer right"}) as feed:
            assert feed.status_code == 200
            assert feed.headers["content-type"].startswith("text/event-stream")
            assert next(feed.iter_lines()) == "event: hello"


def test_without_ui_there_is_neither_page_nor_feed():
    with serving({"ui": False}) as running:
        assert running.get("/").status_code == 404
        assert refusal(running, "/ui/events")[0] == 404
        assert len(running.engine.observers._observers) == 1  # the metrics


def test_too_many_pages_are_refused_and_their_places_come_back():
    with serving() as running, ExitStack() as pages:

        def status():
            with running.http() as http, http.stream("GET", "/ui/events") as feed:
                return feed.status_code

        http = pages.enter_context(running.http())
        first, *_ = [pages.enter_context(http.stream("GET", "/ui/events")) for _ in range(MAX_WATCHERS)]
        assert refusal(running, "/ui/events") == (503, "too_many_watchers")
        first.close()
        comes_true(lambda: status() == 200)


def test_a_page_that_is_open_does_not_keep_the_server_from_ending():
    with serving() as running, running.http() as http, http.stream("GET", "/ui/events") as feed:
        lines = feed.iter_lines()
        assert next(lines) == "event: hello"
        assert running.stop() == 0
        assert '{"reason":"closed"}' in "".join(lines)


def test_the_page_is_one_file_that_may_reach_nothing_but_its_server():
    whole, policy = live_page()
    assert "/* include" not in whole
    page = re.sub(r"<script>\s*/\*\*\s+\* marked.*?</script>", "", whole, flags=re.DOTALL)  # only its lexer is called
    assert len(whole) - len(page) > 50_000
    assert not re.findall(r"\bsrc=|@import|url\(", page)
    assert set(re.findall(r"https?://[^'\"\s]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in page and "insertAdjacent" not in page and "document.write" not in page
    for part in ("default-src 'none'", "connect-src 'self'", "trusted-types 'none'"):
        assert part in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("num_holders", [1, 2, 254, 255, 300])
def test_the_pools_usage_has_each_blocks_holders_and_whether_it_can_be_found(num_holders):
    manager = make_manager(6)
    holders = [computed(manager, A + B[:2]) for _ in range(num_holders if num_holders < 5 else 1)]
    while len(holders) < num_holders:  # more than there are blocks for tails
        holders.append(make_sequence(A + B[:2]))
        manager.claim(holders[-1], manager.lookup(holders[-1]))
    release(manager, computed(manager, [8] * SIZE))
    counts, findable = pool_usage(manager)
    assert len(counts) == len(findable) == manager.num_blocks
    assert counts[holders[0].block_table[0]] == min(num_holders, 255)
    assert counts[holders[0].block_table[1]] == 1
    assert sum(findable) == manager.num_findable_blocks == 2
    assert findable[holders[0].block_table[0]] == 1
    assert findable[holders[0].block_table[1]] == 0  # not full
    assert counts.count(0) == manager.num_free_blocks + 1  # and the null block
