"""Without ray, everything but `nanovllm.ray` works, and that says what to install."""

import subprocess
import sys

import pytest

import nanovllm.ray

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
import nanovllm.ray
for name in nanovllm.ray.__all__:
    try:
        getattr(nanovllm.ray, name)
    except RuntimeError as error:
        print(error)
"""


def test_a_name_that_needs_ray_says_which_extra_to_install():
    run = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        f"nanovllm.ray.{name} needs ray: pip install 'nanovllm[ray]'."
        for name in ("Stage", "app", "batch", "build", "connect", "stage")
    ]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'deploy'"):
        nanovllm.ray.deploy  # noqa: B018
