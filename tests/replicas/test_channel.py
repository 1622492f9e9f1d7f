"""Messages over a socket: whole, in order, and never waiting for a peer that does not read."""

import random
import threading

from nanovllm.serving.replicas.channel import Channel


def pair():
    channel, other = Channel.pair()
    return channel, Channel(other)


def test_messages_of_any_size_arrive_whole_and_in_order():
    left, right = pair()
    choice = random.Random(1)
    messages = [choice.randbytes(choice.choice([0, 1, 3, 100, 70_000, 900_000])) for _ in range(60)]
    received = []

    def read():
        while len(received) < len(messages):
            right.wait()
            received.extend(right.receive())

    reader = threading.Thread(target=read)
    reader.start()
    for message in messages:
        left.send_all(message)
    reader.join(30.0)
    assert received == messages


def test_sending_does_not_wait_for_a_peer_that_reads_nothing():
    left, right = pair()
    for _ in range(20):
        left.send(b"x" * 100_000)
    assert left.has_unsent
    received = []
    while len(received) < 20:
        received += right.receive()
        left.flush()
    assert received == [b"x" * 100_000] * 20 and not left.has_unsent


def test_half_a_frame_is_kept_until_the_rest_comes():
    left, right = pair()
    left._socket.send((5).to_bytes(4, "little") + b"ab")
    assert right.receive() == [] and not right.is_closed
    left._socket.send(b"cde" + (1).to_bytes(4, "little"))
    assert right.receive() == [b"abcde"]
    left._socket.send(b"f")
    assert right.receive() == [b"f"]


def test_the_last_messages_of_a_peer_that_ended_are_received():
    left, right = pair()
    left.send(b"last")
    left.close()
    assert right.receive() == [b"last"] and right.is_closed
    assert right.receive() == [] and right.is_closed


def test_sending_to_a_peer_that_ended_is_quiet():
    left, right = pair()
    right.close()
    left.send(b"x" * 10)
    left.send_all(b"x" * 10)
    assert not left.has_unsent and left.receive() == [] and left.is_closed


def test_the_end_of_a_peer_is_seen_behind_what_it_sent():
    left, right = pair()
    assert right.has_peer(0.0)
    left.send(b"unread")
    assert right.has_peer(0.0)
    left.close()
    assert not right.has_peer(1.0)
