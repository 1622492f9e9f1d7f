"""A Serve application on a cluster of nodes: answers, streams, routing; clients that leave; nodes that die and join."""

import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier, Event

import httpx
import pytest
import ray
from ray import serve

import nanovllm.ray
from nanovllm import LLM, SamplingParams
from tests.support.llms import comes_true
from tests.support.ray_clusters import ENGINE, NODE_CPUS, die, join
from tests.support.tiny_models import random_prompts, save_tiny

OPTIONS = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 257, "max_model_len": 2048}
KEY = {"Authorization": "Bearer secret"}
PROMPTS = random_prompts(6, low=20, high=60)


@dataclass
class Application:
    url: str
    expected: list[list[int]]  # greedy answers to PROMPTS

    def post(self, body, **headers):
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=KEY | headers, timeout=90.0)

    def answer(self, prompt, **options):
        response = self.post({"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True} | options)
        assert response.status_code == 200, response.text
        return response.json()


def replicas():
    """The controller's report to routers on each running replica."""
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    details = ray.get(controller.get_serve_instance_details.remote())
    found = details["applications"].get("default", {}).get("deployments", {}).get("Replica", {}).get("replicas", [])
    return [replica for replica in found if replica["state"] == "RUNNING"]


@pytest.fixture(scope="module")
def application(cluster, tmp_path_factory):
    """Two replicas, one a node; the front and the proxy are on the head."""
    folder = save_tiny(Path(tmp_path_factory.mktemp("model")))
    with LLM(folder, **OPTIONS) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=12)
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy, use_tqdm=False)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(
        nanovllm.ray.app(
            folder,
            autoscaling_config={"min_replicas": 2, "max_replicas": 2},
            server={"api_key": ["secret"], "served_model_name": "tiny"},
            ray_actor_options={"num_cpus": NODE_CPUS, "resources": ENGINE},
            **OPTIONS,
        )
    )
    yield Application(f"http://127.0.0.1:{port}", expected)
    serve.shutdown()


def test_answers_are_those_of_an_engine(application):
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(application.answer, PROMPTS))
    assert [answer["choices"][0]["token_ids"] for answer in answers] == application.expected


def test_a_bad_request_and_a_missing_key_are_refused_as_by_the_server(application):
    assert "unknown field" in application.post({"prompt": "a", "max_token": 1}).json()["error"]["message"]
    assert application.post({"prompt": "a"}, Authorization="Bearer wrong").status_code == 401
    assert application.post({"prompt": "a"}, Host="example.org").status_code == 421
    assert httpx.get(f"{application.url}/health").status_code == 200


def test_a_prompt_goes_where_its_prefix_is_cached(application):
    """Replicas take turns otherwise, so that the second request would find nothing."""
    for prompt in random_prompts(3, low=200, high=200, seed=7):
        cached = [application.answer(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(4)]
        assert cached == [0, 192, 192, 192]


def test_a_client_that_leaves_ends_its_request(application):
    handle = serve.get_deployment_handle("Replica", "default")

    def num_running():
        stats = [handle.record_routing_stats.remote().result() for _ in range(8)]  # of any replica
        return max(one["num_running"] for one in stats)

    body = {"prompt": PROMPTS[1], "max_tokens": 1900, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{application.url}/v1/completions", json=body, headers=KEY, timeout=60.0) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        assert num_running() == 1
    comes_true(lambda: num_running() == 0, 3.0)  # all its tokens would take longer


def test_streams_of_a_killed_replica_go_on_token_for_token(application):
    body = {"max_tokens": 200, "temperature": 1.0, "seed": 9, "ignore_eos": True, "return_token_ids": True}
    expected = [application.answer(prompt, **body) for prompt in PROMPTS]
    begun, is_dead = Barrier(len(PROMPTS) + 1), Event()

    def read(prompt):
        options = body | {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
        url, events = f"{application.url}/v1/completions", []
        with httpx.stream("POST", url, json=options, headers=KEY, timeout=60.0) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                    if len(events) == 10:
                        begun.wait(60.0)
                        is_dead.wait(60.0)
        return events

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        streams = [threads.submit(read, prompt) for prompt in PROMPTS]
        begun.wait(60.0)
        os.kill(replicas()[0]["pid"], signal.SIGKILL)
        is_dead.set()
        for answer, stream in zip(expected, streams, strict=True):
            *events, usage = stream.result()
            choices = [event["choices"][0] for event in events]
            assert [t for choice in choices for t in choice["token_ids"]] == answer["choices"][0]["token_ids"]
            assert "".join(choice["text"] for choice in choices) == answer["choices"][0]["text"]
            assert usage["usage"]["completion_tokens"] == 200
    comes_true(lambda: len(replicas()) == 2, 60.0)


def test_a_node_that_dies_costs_no_answer_and_another_joins(cluster, application):
    with ThreadPoolExecutor(12) as threads:
        answers = [threads.submit(application.answer, prompt, max_tokens=300) for prompt in PROMPTS * 2]
        die(cluster)
        assert {len(answer.result()["choices"][0]["token_ids"]) for answer in answers} == {300}
    assert application.answer(PROMPTS[0])["choices"][0]["token_ids"] == application.expected[0]
    comes_true(lambda: len(replicas()) == 1, 30.0)
    join(cluster)
    comes_true(lambda: len(replicas()) == 2, 60.0)
    assert application.answer(PROMPTS[2])["choices"][0]["token_ids"] == application.expected[2]
