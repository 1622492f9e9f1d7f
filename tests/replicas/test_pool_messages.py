"""What a pool sends its replicas: requests once, aborts, and nothing of what has ended; without processes."""

from nanovllm.features.sampling_params import SamplingParams
from nanovllm.requests import InputProcessor, RequestLimits
from nanovllm.sequence import NewRequest
from nanovllm.serving.replicas.messages import Abort, Add
from nanovllm.serving.replicas.pool import GRACE_SECONDS, PoolParts, ReplicaPool
from nanovllm.serving.replicas.replica_queue import ReplicaQueue
from nanovllm.serving.replicas.routing import round_robin
from tests.support.public_options import make_config


class Fleet:
    """Two replicas that are up; what is sent to them, and what they are said to report: None for a death."""

    has_failed = False

    def __init__(self):
        self.replicas = self.up = [ReplicaQueue(0), ReplicaQueue(1)]
        self.sent = []
        self.reports = []

    def listen(self):
        reports, self.reports = self.reports, []
        return reports

    def send(self, replica, message):
        self.sent.append((replica.index, message))

    def stalled(self):
        return []

    def wake(self, *_):
        """Nothing sleeps, ends or starts."""

    wait = drop = restart = wake


def make_pool(now=1.0):
    config, fleet = make_config(data_parallel_size=2, block_size=16), Fleet()
    processor = InputProcessor(None, config, RequestLimits(100, 100, "Tiny"))
    pool = ReplicaPool(fleet, PoolParts(config, processor, None, "", expects_prefixes=False), round_robin())
    pool.clock = lambda: now
    return pool, fleet


def request(**options):
    return NewRequest("a", [1, 2], SamplingParams(max_tokens=9), arrival_time=1.0, **options)


def test_an_abort_reaches_the_replica_of_its_request():
    pool, fleet = make_pool()
    pool.add(request())
    pool.abort("a")
    (_, added), (index, aborted) = fleet.sent
    assert isinstance(added, Add) and isinstance(aborted, Abort) and index == 0 and not pool.requests


def test_a_request_whose_replica_dies_goes_to_another_one():
    pool, fleet = make_pool()
    pool.add(request())
    fleet.reports = [(fleet.replicas[0], None)]
    pool.step()
    assert [index for index, _ in fleet.sent] == [0, 1] and pool.has_unfinished


def test_a_request_that_ends_in_the_step_of_its_replicas_death_is_not_sent_again():
    pool, fleet = make_pool(now=3.0 + GRACE_SECONDS)
    pool.add(request(timeout=1.0))
    fleet.reports = [(fleet.replicas[0], None)]
    pool.step()
    assert [output.outputs[0].finish_reason for output in pool.outputs] == ["timeout"]
    assert [index for index, _ in fleet.sent] == [0] and not pool.has_unfinished


def test_a_request_that_waits_for_a_replica_ends_at_its_timeout_and_is_not_sent_when_one_is_up():
    pool, fleet = make_pool(now=3.0 + GRACE_SECONDS)
    fleet.up = []
    pool.add(request(timeout=1.0))
    pool.step()
    assert [output.outputs[0].finish_reason for output in pool.outputs] == ["timeout"]
    fleet.up = fleet.replicas
    pool.step()
    assert not fleet.sent and not pool.has_unfinished
