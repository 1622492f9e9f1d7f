"""Models of a hub: fetched from one that answers, read from its cache without one, refused after one request."""

import socket

import pytest

from tests.support.hubs import COMMIT, cached, generate_once, serving
from tests.support.tiny_models import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def nowhere():
    """The address of a hub that refuses connections."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and never listens
        yield f"http://127.0.0.1:{closed.getsockname()[1]}"


@pytest.mark.full
def test_a_model_of_a_hub_that_answers_is_fetched(folder, tmp_path):
    with serving({"own/tiny": folder}) as hub:
        done = generate_once("own/tiny", tmp_path, hub.endpoint)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "models--own--tiny" / "snapshots" / COMMIT / "model.safetensors").is_file()


def test_a_model_that_a_hub_has_not_is_refused_after_one_request(folder, tmp_path):
    with serving({"own/tiny": folder}) as hub:
        done = generate_once("own/tinny", cached(folder, tmp_path), hub.endpoint)
    assert done.returncode == 2
    assert "there is none of this name" in done.stderr and "Did you mean own/tiny?" in done.stderr
    assert hub.requests == ["HEAD /own/tinny/resolve/main/config.json"]


def test_a_revision_that_a_model_has_not_is_refused_by_name(folder, tmp_path):
    with serving({"own/tiny": folder}) as hub:
        done = generate_once("own/tiny", tmp_path, hub.endpoint, "--revision", "v9")
    assert done.returncode == 2
    assert "no revision 'v9'" in done.stderr
    assert len(hub.requests) == 1


@pytest.mark.full
def test_without_a_hub_a_model_of_its_cache_is_served_from_there(folder, tmp_path, nowhere):
    done = generate_once("own/tiny", cached(folder, tmp_path), nowhere)
    assert done.returncode == 0, done.stderr
    assert "Retrying" not in done.stderr


def test_without_a_hub_another_model_is_refused_in_one_line_with_the_nearest_name(folder, tmp_path, nowhere):
    done = generate_once("own/tinny", cached(folder, tmp_path), nowhere)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "the hub cannot be reached" in done.stderr and "Did you mean own/tiny?" in done.stderr


@pytest.mark.full
def test_without_a_hub_a_tokenizer_that_is_not_cached_is_refused_too(folder, tmp_path, nowhere):
    done = generate_once(str(folder), tmp_path, nowhere, "--tokenizer", "own/tokens")
    assert done.returncode == 2
    assert "'own/tokens'" in done.stderr and "the hub cannot be reached" in done.stderr
