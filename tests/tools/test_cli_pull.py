"""`nanovllm pull` and `rm`, and GGUF files of a repository by their quantisation, from a hub on this machine."""

import socket

import pytest

from nanovllm.errors import ModelLoadError
from nanovllm.models import hub_files
from tests.support.command_line import assert_refused, words
from tests.support.hubs import COMMIT, cached, nanovllm, serving
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import save_tiny, tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "tiny")
    (root / "tiny" / "notes.gif").write_bytes(b"not needed")
    (root / "packed" / "parts").mkdir(parents=True)
    write_gguf(root / "packed" / "model-Q8_0.gguf", tiny_model(head_dim=64))
    (root / "packed" / "model-Q4_K_M.gguf").write_bytes(b"GGUF of no use")
    for number in (1, 2):
        (root / "packed" / "parts" / f"model-BF16-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    (root / "packed" / "mmproj-F16.gguf").write_bytes(b"GGUF")
    return {"own/tiny": root / "tiny", "own/packed": root / "packed"}


@pytest.fixture
def nowhere():
    """The address of a hub that refuses connections."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and never listens
        yield f"http://127.0.0.1:{closed.getsockname()[1]}"


def files(cache, name):
    snapshot = cache / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
    return sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file())


def test_a_model_is_fetched_whole_and_removed(models, tmp_path):
    with serving(models) as hub:
        done = nanovllm("pull", "own/tiny", cache=tmp_path, endpoint=hub.endpoint)
        assert done.returncode == 0, done.stderr
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {*files(tmp_path, "own/tiny")}
        assert "notes.gif" not in files(tmp_path, "own/tiny")
        assert done.stdout.startswith("own/tiny is in ") and done.stdout.endswith(" MB)\n")
        done = nanovllm("rm", "own/tiny", cache=tmp_path, endpoint=hub.endpoint)
        assert done.returncode == 0 and done.stdout.startswith("own/tiny is removed ("), done.stderr
        assert not list(tmp_path.glob("models--*"))


def test_a_file_of_a_repository_is_fetched_by_its_quantisation(models, tmp_path):
    with serving(models) as hub:
        for name in ("own/packed:q8_0", "own/packed:BF16"):
            done = nanovllm("pull", name, cache=tmp_path, endpoint=hub.endpoint)
            assert done.returncode == 0, done.stderr
        parts = [f"parts/model-BF16-0000{number}-of-00002.gguf" for number in (1, 2)]
        assert files(tmp_path, "own/packed") == ["model-Q8_0.gguf", *parts]
        done = nanovllm("rm", "own/packed:BF16", cache=tmp_path, endpoint=hub.endpoint)
        assert done.returncode == 0, done.stderr
        assert files(tmp_path, "own/packed") == ["model-Q8_0.gguf"]


@pytest.mark.full
def test_hf_runs_a_file_of_a_repository_and_then_without_a_hub(models, tmp_path, nowhere):
    flags = words("--raw --max-tokens 2 --enforce-eager --max-model-len 64 one")
    with serving(models) as hub:
        done = nanovllm("generate", "-hf", "own/packed:Q8_0", *flags, cache=tmp_path, endpoint=hub.endpoint)
    assert done.returncode == 0, done.stderr
    again = nanovllm("generate", "-m", "own/packed:Q8_0", *flags, cache=tmp_path, endpoint=nowhere)
    assert again.returncode == 0 and again.stdout == done.stdout, again.stderr


@pytest.mark.costly
@pytest.mark.parametrize(
    "arguments, named",
    {
        "pull own/nothing": "there is none of this name",
        "pull own/tiny --revision v9": "no revision 'v9'",
        "pull own/packed": "name one, own/packed:BF16, of BF16, Q4_K_M, Q8_0",
        "pull own/packed:Q2_K": "own/packed has no GGUF file of Q2_K; it has BF16, Q4_K_M, Q8_0",
        "pull own/tiny:Q8_0": "own/tiny has no GGUF files. Name it without a quantisation",
    }.items(),
)
def test_what_a_hub_has_not_is_refused_by_name(models, tmp_path, arguments, named):
    with serving(models) as hub:
        done = nanovllm(*words(arguments), cache=tmp_path, endpoint=hub.endpoint)
    assert done.returncode == 2 and named in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.full
def test_without_a_hub_what_is_cached_stays_and_the_rest_is_refused(models, tmp_path, nowhere):
    cached(models["own/tiny"], tmp_path)
    assert nanovllm("pull", "own/tiny", cache=tmp_path, endpoint=nowhere).returncode == 0
    for arguments in (["pull", "own/tinny"], ["pull", "own/packed:Q8_0"]):
        done = nanovllm(*arguments, cache=tmp_path, endpoint=nowhere)
        assert done.returncode == 2 and "the hub cannot be reached" in done.stderr
    done = nanovllm("rm", "own/tinny", cache=tmp_path, endpoint=nowhere)
    assert done.returncode == 2 and "has no model 'own/tinny'. Did you mean own/tiny?" in done.stderr


def test_paths_are_no_models_of_the_hub(tmp_path, command):
    for name in ("pull", "rm"):
        assert_refused(command(f"{name} {tmp_path}"), f"{tmp_path} is a path")


def test_the_embedded_model_is_removed_too(tmp_path, command, monkeypatch):
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    folder = save_tiny(tmp_path / "smollm2-135m-instruct-v1")
    status, out, _ = command("rm smollm2-135m-instruct")
    assert status == 0 and "is removed" in out and not folder.exists()
    assert command("rm smollm2-135m-instruct")[0] == 2


@pytest.mark.parametrize(
    "quant, names, chosen",
    [
        ("auto", ["a-Q8_0.gguf", "a-Q4_K_M.gguf"], "a-Q4_K_M.gguf"),
        ("auto", ["a-Q8_0.gguf"], "a-Q8_0.gguf"),
        ("Q4_K", ["a.Q4_K.gguf", "a.Q4_K_M.gguf"], "a.Q4_K.gguf"),
        ("a-Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "a-Q8_0.gguf"),
        ("IQ4_XS", ["Q8_0/a-Q8_0-00001-of-00002.gguf", "IQ4_XS/a-IQ4_XS-00001-of-00002.gguf"], None),
    ],
)
def test_the_file_of_a_quantisation(quant, names, chosen):
    assert hub_files.choose_gguf("own/model", quant, names) == (chosen or names[-1])


@pytest.mark.parametrize(
    "quant, names, named",
    [
        ("auto", ["a-Q8_0.gguf", "a-Q5_0.gguf"], "no GGUF file of Q4_K_M; it has Q5_0, Q8_0"),
        ("Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "2 files of Q8_0: a-Q8_0.gguf, b-Q8_0.gguf. Name one"),
    ],
)
def test_a_choice_that_is_none_is_refused(quant, names, named):
    with pytest.raises(ModelLoadError, match=named):
        hub_files.choose_gguf("own/model", quant, names)
