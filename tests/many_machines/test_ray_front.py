"""The front without a cluster: answers over replicas of this process, which die in the middle of them."""

import asyncio
import json
import time
from collections import defaultdict

import httpx
import pytest
from ray.exceptions import ActorDiedError

from nanovllm import SamplingParams
from nanovllm.errors import ModelLoadError
from nanovllm.features.prompt_hashes import num_leading_hits
from nanovllm.features.speculation import lengths
from nanovllm.features.speculation.speculation import SpeculationCounts
from nanovllm.outputs import RequestMetrics
from nanovllm.ray.fleet import RayFleet
from nanovllm.ray.front import Front
from nanovllm.ray.prompt import Prompt
from nanovllm.ray.replica import RayReporter, Replica, decode_request
from nanovllm.ray.router import HeldBlocks
from nanovllm.sequence import NewRequest
from nanovllm.serving.replicas.messages import Add, SentRequest, decode_from_engine, encode
from nanovllm.serving.replicas.pool_adapters import PoolAdapters
from nanovllm.serving.replicas.pool_request import MAX_DEATHS
from nanovllm.serving.server.settings import ServerSettings
from tests.support.tiny_models import random_prompts, save_tiny, tiny_tokenizer

OPTIONS = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
TEXT = "The quick brown fox jumps over the lazy dog. " * 8
SETTINGS = ServerSettings(served_model_name="tiny", api_key=("secret",), cache_salt_per_key=True, ui=False)
HEADERS = {"Authorization": "Bearer secret"}
CHAT = [{"role": "user", "content": "Name three colours."}]
SCHEMA = {"type": "object", "properties": {"colours": {"type": "array", "items": {"type": "string"}, "minItems": 9}}}
SAMPLED = {"max_tokens": 60, "temperature": 1.0, "seed": 7, "ignore_eos": True}
PROMPT = random_prompts(1, low=40, high=40, seed=3)[0]


class Response:
    """Result of a handle's call."""

    def __init__(self, reports):
        self._items = asyncio.Queue()
        self._task = asyncio.ensure_future(self._read(reports))

    async def _read(self, reports):
        try:
            async for report in reports:
                self._items.put_nowait(report)
            self._items.put_nowait(StopAsyncIteration())
        except Exception as error:
            self._items.put_nowait(error)

    def __aiter__(self):
        return self

    async def __anext__(self):
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def die(self):
        self._task.cancel()
        self._items.put_nowait(ActorDiedError())

    def cancel(self):
        self._task.cancel()


class Handle:
    """A deployment's handle over replicas of this process, which take turns. A dead one is there again at once.

    Args:
        kills: whether the replica dies that has yielded so many reports since it last died, for this request's prompt.
    """

    def __init__(self, replicas, kills):
        self._replicas, self._kills = replicas, kills
        self._open = defaultdict(list)
        self._num_reports = [0] * len(replicas)
        self._names = [str(index) for index in range(len(replicas))]
        self.num_deaths, self.num_calls = 0, 0
        self.prompts = []
        self.stats = {}  # of the first replica, at the end
        self.metadata = {}

    def options(self, **_):
        return self

    @property
    def generate(self):
        return Call(self._generate)

    @property
    def describe(self):
        return Call(self._replicas[0].describe)

    def _generate(self, data, *arguments, prompt):
        index = self.num_calls % len(self._replicas)
        self.num_calls += 1
        self.prompts.append(prompt)
        prompt.routed(self._names[index], self._names)
        token_ids = decode_request(data).prompt_token_ids

        async def read():
            reports = self._replicas[index].generate(data, *arguments, Prompt())
            try:
                if self._kills(0, token_ids):
                    self._die(index)
                async for report in reports:
                    yield report
                    self._num_reports[index] += 1
                    if self._kills(self._num_reports[index], token_ids):
                        self._die(index)
            finally:
                await reports.aclose()

        response = Response(read())
        self._open[index].append(response)
        return response

    def _die(self, index):
        for response in self._open.pop(index):
            response.die()
        self._num_reports[index] = 0
        self.num_deaths += 1
        self._names[index] = f"{index} after {self.num_deaths} deaths"


class Call:
    def __init__(self, remote):
        self.remote = remote


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return str(save_tiny(folder, eos_token_id=tiny_tokenizer().convert_tokens_to_ids("<|end|>")))


def answers(
    folder,
    requests,
    kills=lambda num_reports, token_ids: False,
    **options,
):
    """Answers of clients that ask at the same time."""
    options = OPTIONS | {"enable_prefix_caching": False, "max_queue": 1024} | options

    async def ask():
        own = {name: value for name, value in options.items() if name != "max_queue"}
        replicas = [await asyncio.to_thread(Replica, folder, None, own, stall_timeout=60.0) for _ in range(2)]
        handle, front = Handle(replicas, kills), Front.__new__(Front)
        limit = options["max_queue"]
        await front.__init__(handle, (folder, None, own), SETTINGS, max_queue=limit, max_replicas=2)
        transport = httpx.ASGITransport(front.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as client:
            found = await asyncio.gather(*(client.post(path, json=body, timeout=None) for path, body in requests))
        assert len(front.engine._pool.replicas) <= 3  # places of the dead
        await front.engine.close()
        handle.stats = await replicas[0].record_routing_stats()
        handle.metadata = await replicas[0].record_replica_metadata()
        for replica in replicas:
            replica.__del__()
            await asyncio.to_thread(replica._thread.join)
        return found, handle

    return asyncio.run(ask())


def joined(response):
    """Choices and usage of an answer, of a stream its joined events; without ids and times."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        answer = response.json()
        return {"usage": answer["usage"], "choices": answer["choices"]}
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    found = {"usage": None}
    for event in map(json.loads, lines):
        assert "error" not in event
        found["usage"] = event["usage"] or found["usage"]
        for choice in event["choices"]:
            join(found.setdefault(choice.pop("index"), {}), choice)
    return found


def join(whole, part):
    for name, value in part.items():
        if isinstance(value, dict):
            join(whole.setdefault(name, {}), value)
        elif isinstance(value, (str, list)) and name != "role":
            whole[name] = whole.get(name, type(value)()) + value
        elif value is not None:
            whole[name] = value


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
COMPLETION, TOKENS = {"prompt": PROMPT}, {"return_token_ids": True}
JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
ON_COMPLETIONS = {
    "greedy": COMPLETION | SAMPLED | STREAM | TOKENS | {"temperature": 0},
    "sampled": COMPLETION | SAMPLED | STREAM | TOKENS | {"top_p": 0.9, "frequency_penalty": 0.5},
    "log-probabilities": COMPLETION | SAMPLED | STREAM | {"logprobs": 2},
    "samples and stops": COMPLETION | SAMPLED | STREAM | {"n": 3, "stop": ["xq", "e"], "min_tokens": 30},
    "several prompts": SAMPLED | STREAM | {"prompt": [PROMPT, PROMPT[:9]]},
    "echo": COMPLETION | SAMPLED | {"echo": True, "logprobs": 1},
}
ON_CHATS = {
    "structured": SAMPLED | STREAM | {"messages": CHAT, "response_format": JSON, "ignore_eos": False},
    "conversation": SAMPLED | STREAM | {"messages": CHAT, "logprobs": True, "top_logprobs": 2},
    "whole": SAMPLED | {"messages": CHAT, "n": 2},
}
REQUESTS = {name: ("/v1/completions", body) for name, body in ON_COMPLETIONS.items()} | {
    name: ("/v1/chat/completions", body) for name, body in ON_CHATS.items()
}


def assert_same(found, expected, where):
    """Equal up to the rounding of log-probabilities, which depends on the batch."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}: {name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{where}: {number}")
    else:
        assert found == expected, where


def assert_answers_survive(folder, num_deaths, num_reports, **options):
    """Replicas die so often, after so many reports each, and every answer is that of replicas that live."""
    deaths = iter(range(num_deaths))

    def kills(num_reports_now, token_ids):
        return num_reports_now == num_reports and next(deaths, None) is not None

    undisturbed, _ = answers(folder, list(REQUESTS.values()))
    found, handle = answers(folder, list(REQUESTS.values()), kills, **options)
    assert handle.num_deaths == num_deaths
    for name, response, expected in zip(REQUESTS, found, undisturbed, strict=True):
        assert_same(joined(response), joined(expected), name)


def test_adapters_are_refused_by_name():
    fleet = RayFleet(Handle([], None), None, max_num_seqs=1, hash_seed="")
    with pytest.raises(ValueError, match=r"^load_adapter does not work with nanovllm.ray: "):
        PoolAdapters(fleet).load("a", "/adapters/a", pytest.fail)


def test_answers_are_token_for_token_the_same_though_replicas_die_in_the_middle(folder):
    assert_answers_survive(folder, num_deaths=2, num_reports=100)


@pytest.mark.parametrize(("source", "least"), [("suffix", 1), ("draft", 100)])  # random text hardly repeats
def test_replicas_with_drafts_answer_as_those_without_though_one_dies_in_the_middle(folder, monkeypatch, source, least):
    accepted = []
    add = SpeculationCounts.add

    def counted(self, source, num_drafted, num_accepted):
        accepted.append(num_accepted)
        add(self, source, num_drafted, num_accepted)

    monkeypatch.setattr(SpeculationCounts, "add", counted)
    monkeypatch.setattr(lengths, "PLAIN_WINDOW", 10**9)  # drafts never rest
    drafts = {"speculation": source} | ({"draft_model": folder} if source == "draft" else {})
    assert_answers_survive(folder, num_deaths=1, num_reports=30, **drafts)
    assert sum(accepted) >= least


def test_embeddings_and_the_other_interfaces_are_answered(folder):
    chat = [{"role": "user", "content": TEXT}]
    requests = [
        ("/v1/embeddings", {"input": [TEXT, "fox"]}),
        ("/v1/messages", {"model": "tiny", "messages": chat, "max_tokens": 5}),
        ("/v1/responses", {"model": "tiny", "input": TEXT, "max_output_tokens": 16}),
        ("/tokenize", {"prompt": TEXT}),
    ]
    found, handle = answers(folder, requests)
    assert [response.status_code for response in found] == [200] * 4, [response.text for response in found]
    assert len({len(each["embedding"]) for each in found[0].json()["data"]}) == 1
    assert found[1].json()["usage"]["output_tokens"] == 5
    assert handle.num_calls == 4  # two texts, a message, a response


def test_a_request_that_kills_replicas_is_given_up_and_costs_no_other_an_answer(folder, caplog):
    poison = [5, 6, 7]
    bodies = [COMPLETION | SAMPLED | {"prompt": prompt} for prompt in ([3, 4], poison, [8, 9])]
    found, handle = answers(folder, [("/v1/completions", body) for body in bodies], lambda _, ids: ids == poison)
    assert [response.status_code for response in found] == [200, 500, 200]
    assert f"{MAX_DEATHS} replicas died with it before they gave it a token" in caplog.text
    assert handle.num_deaths == MAX_DEATHS


def test_a_request_that_a_replica_refuses_is_tried_elsewhere_and_then_given_up(folder, monkeypatch):
    def prepare(self, sent):
        raise RuntimeError("no memory")

    monkeypatch.setattr(RayReporter, "prepare", prepare)
    (response,), handle = answers(folder, [("/v1/completions", COMPLETION)])
    assert (response.status_code, handle.num_calls, handle.num_deaths) == (500, MAX_DEATHS, 0)


def test_more_requests_than_the_queue_holds_are_429(folder):
    body = COMPLETION | SAMPLED | {"n": 2}
    found, _ = answers(folder, [("/v1/completions", body)] * 3, max_num_seqs=1, max_queue=2)
    assert sorted(response.status_code for response in found) == [200, 200, 429]


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": TEXT}),
    ("/v1/completions", {"prompt": list(range(100)), "cache_salt": "mine"}),
    ("/v1/messages", {"model": "tiny", "system": TEXT, "messages": [{"role": "user", "content": TEXT}]}),
], ids=["text", "tokens and salt", "messages"])  # fmt: skip
def test_a_replica_reports_the_blocks_that_the_router_expects_of_a_prompt(folder, path, body):
    (response,), handle = answers(folder, [(path, body | {"max_tokens": 1})], enable_prefix_caching=True)
    assert response.status_code == 200, response.text
    hashes = handle.prompts[0].hashes(handle.metadata["hash_seed"], handle.metadata["block_size"])
    held = HeldBlocks()
    held.report(handle.stats["blocks"])
    assert len(hashes) >= 2
    assert num_leading_hits(hashes, held) == len(hashes)


def generated(folder, hash_seed, sent_at):
    """A replica's report of a request, sent at this time of the front's clock."""

    async def generate():
        replica = Replica(folder, None, OPTIONS, stall_timeout=60.0)
        assert await replica.describe(folder, None, OPTIONS | {"block_size": 32}) is None  # of another version
        ready = decode_from_engine(await replica.describe(folder, None, OPTIONS) or b"")
        request = NewRequest("one", PROMPT, SamplingParams(max_tokens=3), arrival_time=sent_at, timeout=100.0)
        data = encode(Add([SentRequest.from_new(request, 5, None)]))
        reports = replica.generate(data, hash_seed or ready.hash_seed, sent_at, Prompt())
        try:
            return [decode_from_engine(report) async for report in reports]
        finally:
            replica.__del__()

    return asyncio.run(generate())


def test_times_are_those_of_the_clock_of_the_front(folder):
    clock = time.monotonic() - 1e6  # of a machine that was started later
    outputs = [sent for report in generated(folder, None, clock) for sent in report.outputs]
    metrics = RequestMetrics(*outputs[-1].metrics)
    assert {sent.placement for sent in outputs} == {5} and outputs[-1].finished
    assert outputs[-1].completions[0].finish_reason == "length"
    times = [metrics.arrival_time, metrics.scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert times == sorted(times)
    assert metrics.arrival_time == pytest.approx(clock) and metrics.finished_time < clock + 100.0


def test_a_replica_of_another_model_takes_no_request(folder):
    with pytest.raises(ModelLoadError, match="and the front 'another model'"):
        generated(folder, "another model", 0.0)
