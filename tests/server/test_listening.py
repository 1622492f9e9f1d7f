"""Listening sockets: a port belongs to one server from before its model is loaded, and to the next one at once."""

import socket

import pytest

from nanovllm.serving.server.listening import allow_restart, bind


def port_of(listeners):
    number = listeners[0].getsockname()[1]
    return number


def close(listeners):
    for listener in listeners:
        listener.close()


def leave_lingering_connection(listener):
    """Serve a client whose connection the server closes first, so that its end stays in TIME_WAIT."""
    with socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        accepted.close()
        assert client.recv(1) == b""


def test_two_servers_that_load_their_models_at_the_same_time_cannot_have_the_same_port():
    first = bind("127.0.0.1", 0)
    with pytest.raises(OSError, match="another process uses this port"):
        bind("127.0.0.1", port_of(first))
    close(first)


def test_a_server_binds_the_port_of_one_that_has_just_ended_and_holds_it_alone():
    first = bind("127.0.0.1", 0)
    port = port_of(first)
    allow_restart(first[0])
    first[0].listen()
    leave_lingering_connection(first[0])
    close(first)
    second = bind("127.0.0.1", port)
    with pytest.raises(OSError, match="another process uses this port"):
        bind("127.0.0.1", port)
    allow_restart(second[0])
    second[0].listen()
    close(second)


def test_clients_are_refused_while_a_socket_is_bound_and_does_not_listen():
    bound = bind("127.0.0.1", 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound[0].getsockname())
    close(bound)
