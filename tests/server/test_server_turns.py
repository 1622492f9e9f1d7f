"""Requests that come at once begin a few at a time, in their order; /health does not wait for them."""

import asyncio

from nanovllm.features.intake.intake import CLIENT
from nanovllm.serving.server.turns import PER_TURN, Turns

COUNT = 5 * PER_TURN


class Recorded:
    """An application that notes which requests begin, and in which turn of the event loop."""

    def __init__(self):
        self.turn = 0
        self.begun = []

    async def __call__(self, scope, receive, send):
        self.begun.append((self.turn, scope["path"]))

    @property
    def paths(self):
        return [path for _, path in self.begun]

    def count_turns(self):
        self.turn += 1
        asyncio.get_running_loop().call_soon(self.count_turns)

    def request(self, turns, path, client=""):
        return asyncio.create_task(turns({"type": "http", "path": path, "client": client}, None, None))


def recorded():
    """An application and the turns of its requests."""
    app = Recorded()
    return app, Turns(app, lambda scope: scope.get("client", ""))


async def test_requests_begin_in_their_order_a_few_in_each_turn():
    app, turns = recorded()
    app.count_turns()
    await asyncio.gather(*(app.request(turns, str(number)) for number in range(COUNT)))
    assert app.paths == [str(number) for number in range(COUNT)]
    numbers = [turn for turn, _ in app.begun]
    assert max(map(numbers.count, numbers)) == PER_TURN and len(set(numbers)) == COUNT // PER_TURN


async def test_a_late_question_for_health_overtakes_those_that_wait():
    app, turns = recorded()
    tasks = [app.request(turns, str(number)) for number in range(COUNT)]
    await asyncio.sleep(0)
    await app.request(turns, "/health")
    place = app.paths.index("/health")
    await asyncio.gather(*tasks)
    assert place < COUNT - PER_TURN


async def test_a_client_does_not_wait_for_the_turns_of_another():
    app, turns = recorded()
    tasks = [app.request(turns, str(number), "alice") for number in range(COUNT)]
    tasks.append(app.request(turns, "bob", "bob"))
    await asyncio.gather(*tasks)
    assert app.paths.index("bob") <= 2 * PER_TURN
    assert not turns._waiting and not turns._accounts._accounts


async def test_each_request_knows_its_client():
    seen = []

    async def app(scope, receive, send):
        seen.append(CLIENT.get())

    turns = Turns(app, lambda scope: scope["client"])
    await asyncio.gather(*(turns({"type": "http", "path": "/", "client": name}, None, None) for name in "ab"))
    assert seen == ["a", "b"] and CLIENT.get() is None


async def test_a_client_that_left_while_it_waited_takes_nobodys_turn():
    app, turns = recorded()
    app.count_turns()
    tasks = [app.request(turns, name) for name in ["first"] * PER_TURN + ["left"] * 2 + ["last"] * PER_TURN]
    await asyncio.sleep(0)
    for task in tasks[PER_TURN:][:2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert app.paths.count("last") == PER_TURN
    assert len({turn for turn, path in app.begun if path == "last"}) == 1
