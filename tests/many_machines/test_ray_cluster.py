"""Bad input on Ray is refused before anything is loaded: addresses without a cluster, options, rows."""

import subprocess
import sys
import time

import pytest

import nanovllm.ray
from nanovllm.ray.application import build

NO_CLUSTER = """
import sys
import nanovllm.ray
for address in sys.argv[1:]:
    try:
        nanovllm.ray.connect(address, timeout=1.0)
    except (ConnectionError, ValueError) as error:
        print(type(error).__name__, error)
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_an_address_that_does_not_answer_is_an_error_before_anything_is_loaded():
    """In seconds: Ray alone tries for minutes."""
    start = time.monotonic()
    command = [sys.executable, "-c", NO_CLUSTER, "127.0.0.1:1", "ray://127.0.0.1:1", "localhost"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert time.monotonic() - start < 30.0
    nobody, no_client, no_port, loaded = run.stdout.splitlines()
    assert nobody.startswith(
        "ConnectionError no Ray cluster answers at 127.0.0.1:1 within 1 s. Start one there with `ray"
    )
    assert no_client.startswith("ConnectionError no Ray cluster answers at ray://127.0.0.1:1 within 1 s.")
    assert no_port.startswith("ValueError the Ray address 'localhost' has no port.")
    assert loaded == "[]"


@pytest.mark.parametrize(("arguments", "error", "says"), [
    ({"server": {"port": 80}}, ValueError, "port cannot be set for an application on Ray: .*http_options"),
    ({"server": {"ui": True}}, ValueError, "ui cannot be set for an application on Ray"),
    ({"server": {"colour": 1}}, TypeError, "'colour' is not an option of the server"),
    ({"num_replicas": 0}, ValueError, "num_replicas is 0; it must be at least 1"),
    ({"num_replicas": 2, "autoscaling_config": {}}, ValueError, "Give one of them"),
    ({"data_parallel_size": 2}, ValueError, "Set num_replicas"),
    ({"routing": "nearest"}, ValueError, "routing is 'nearest'; it must be one of round-robin"),
    ({"max_num_seq": 2}, TypeError, "max_num_seq"),
    ({"model": 7}, TypeError, "a folder or a hub id"),
], ids=str)  # fmt: skip
def test_bad_arguments_of_an_application_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        nanovllm.ray.app(**arguments)


def test_arguments_of_the_command_line_are_read_as_json():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is -2"):
        build({"model": "somewhere", "num_replicas": "2", "max_num_batched_tokens": "-2"})


@pytest.mark.parametrize(("arguments", "error", "says"), [
    ({"batch_size": 0}, ValueError, "batch_size is 0; it must be at least 1"),
    ({"concurrency": (2, 1)}, ValueError, "concurrency is 1; it must be at least 2"),
    ({"sampling_params": {"temperature": -1}}, ValueError, "temperature is -1"),
    ({"max_num_seq": 2}, TypeError, "max_num_seq"),
], ids=str)  # fmt: skip
def test_bad_arguments_of_a_stage_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        nanovllm.ray.stage(**arguments)
