"""Fixtures that several files of this room need."""

import pytest


@pytest.fixture(scope="session")
def folder():
    """The tiny model and its tokenizer on disk; nobody changes them."""
    from tests.support.replicas import tiny_folder  # not at the top, for tests without torch

    return tiny_folder()
