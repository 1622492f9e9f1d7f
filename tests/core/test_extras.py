"""Without the libraries of any extra the engine generates; what needs one names it with its extra, and does nothing."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from io import StringIO
from pathlib import Path

import pytest

from nanovllm import SamplingParams
from nanovllm.cli.main import main
from nanovllm.features.extras import MissingLibraryError
from tests.support.llms import generate, open_llm
from tests.support.package_sources import trees
from tests.support.serving import serving
from tests.support.tiny_models import save_tiny

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Names to import of distributions that are called otherwise.
DISTRIBUTIONS = {
    "markdown_it": "markdown-it-py", "PIL": "pillow", "prometheus_client": "prometheus-client", "zmq": "pyzmq",
    "opentelemetry": "opentelemetry-sdk", "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
}  # fmt: skip
# Libraries that another one needs itself.
BROUGHT_BY = {
    "huggingface_hub": "transformers", "tokenizers": "transformers", "triton": "torch",
    "starlette": "fastapi", "pydantic": "fastapi", "pydantic_core": "fastapi", "h11": "uvicorn",
    "pyarrow": "ray", "grpc": "ray",
}  # fmt: skip
OTHER_ENGINES = {"vllm", "llama_cpp"}  # which `bench` measures in their own environments


def distributions_of(extra):
    """Distributions of an extra, and of the extras of this package that it names."""
    found = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        if own := re.match(r"nanovllm\[(.*)\]", requirement):
            found |= set().union(*map(distributions_of, own[1].split(",")))
        else:
            found.add(name_of(requirement))
    return found


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0].replace("_", "-")


def distribution(library):
    return DISTRIBUTIONS.get(library, library).replace("_", "-")


def imported_libraries():
    """Libraries of others that any file imports, in functions too."""
    found = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"nanovllm"}


def checked_libraries():
    """(extra, library) of each call of `check_extra`; a starred name is a tuple of the same file."""
    for tree in trees().values():
        constants = {
            ast.unparse(node.targets[0]): node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "check_extra":
                _, extra, *libraries = node.args
                for library in libraries:
                    named = constants.get(ast.unparse(library)[1:]) if isinstance(library, ast.Starred) else library
                    for value in () if named is None else named.elts if isinstance(named, ast.Tuple) else (named,):
                        yield ast.literal_eval(extra), ast.literal_eval(value)


def test_each_check_names_an_extra_that_installs_the_library():
    wrong = {
        (extra, library)
        for extra, library in checked_libraries()
        if distribution(library) not in distributions_of(extra)
    }
    assert wrong == set()


@pytest.mark.full
def test_each_library_that_is_imported_is_a_dependency_or_checked_with_its_extra():
    dependencies = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    checked = {distribution(library.split(".")[0]) for _, library in checked_libraries()}
    known = dependencies | checked
    unknown = {
        library
        for library in imported_libraries() - OTHER_ENGINES
        if distribution(library) not in known and BROUGHT_BY.get(library) not in known
    }
    assert unknown == set()
    assert dependencies <= {distribution(library) for library in imported_libraries()}


WITHOUT_ALL = """
import json, sys

for name in sys.argv[1].split():
    sys.modules[name] = None
from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm import SamplingParams
from nanovllm.cli.main import main
from tests.engine.models import OPTIONS, byte_tokenizer, tiny_model

refusals = {}


def attempt(name, call):
    try:
        call()
    except ValueError as error:
        refusals[name] = str(error)


main(["models"])
with LLM(tiny_model(), tokenizer=byte_tokenizer(), **OPTIONS) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    before = llm.generate("hello", params, use_tqdm=False)
    attempt("a form", lambda: llm.generate("hello", SamplingParams(structured_output={"regex": "a+"}), use_tqdm=False))
    after = llm.generate("hello", params, use_tqdm=False)
attempt("the default model", LLM)
attempt("a hub's GGUF file", lambda: LLM("owner/model:Q4_K_M"))
attempt("replicas", lambda: LLM("no-such-model", data_parallel_size=2))
attempt("a process", lambda: AsyncLLM("no-such-model", engine_process=True))
attempt("events", lambda: LLM("no-such-model", kv_events="tcp://127.0.0.1:5557"))
answers = [output.outputs[0].token_ids for output in (*before, *after)]
print(json.dumps([answers, refusals]))
"""
EXTRAS = {"structured", "gguf", "cli", "serve", "kv-events", "otel"}


@pytest.mark.full
def test_an_engine_without_any_of_them_generates_and_what_needs_one_says_which_extra(tmp_path):
    optional = sorted({library for extra, library in checked_libraries() if extra in EXTRAS})
    assert {"llguidance", "gguf", "pip", "msgspec", "psutil", "rich", "fastapi", "zmq"} <= set(optional)
    environment = os.environ | {"NANOVLLM_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ALL, " ".join(optional)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (before, after), refusals = json.loads(done.stdout.splitlines()[-1])
    assert before == after and len(before) == 4
    assert refusals == {
        "a form": "structured_output needs llguidance: pip install 'nanovllm[structured]'.",
        "the default model": "the model smollm2-135m-instruct needs gguf, pip: pip install 'nanovllm[gguf]'.",
        "a hub's GGUF file": "the model owner/model:Q4_K_M needs gguf: pip install 'nanovllm[gguf]'.",
        "replicas": "data_parallel_size needs msgspec: pip install 'nanovllm[serve]'.",
        "a process": "engine_process needs msgspec: pip install 'nanovllm[serve]'.",
        "events": "kv_events needs zmq, msgspec: pip install 'nanovllm[kv-events]'.",
    }
    assert not (tmp_path / "cache" / "smollm2-135m-instruct-v1").exists()


def test_a_check_for_pip_leaves_setuptools_as_it_was():
    """Its hook gives up its own distutils once it is asked for pip, and PyTorch's compiler imports it later."""
    program = "from nanovllm.features.extras import is_installed; print(is_installed('pip')); import setuptools"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(
    "library, feature, extra, arguments",
    [
        ("fastapi", "the server", "serve", ["serve"]),
        ("uvicorn", "the server", "serve", ["serve"]),
        ("prometheus_client", "the server", "serve", ["serve"]),
        ("msgspec", "the server", "serve", ["serve"]),
        ("psutil", "the server", "serve", ["serve"]),
        ("fastapi", "run-batch", "serve", ["run-batch", "-i", "no-such-file", "-o", "no-such-folder/answers"]),
        ("msgspec", "data_parallel_size", "serve", ["generate", "hi", "--data-parallel-size", "2", "-m", "a/b:Q4_0"]),
        ("zmq", "kv_events", "kv-events", ["generate", "hi", "--kv-events", "tcp://127.0.0.1:5557", "-m", "a/b:Q4_0"]),
        ("llguidance", "structured_output", "structured", ["generate", "hi", "--regex", "a+", "-m", "a/b:Q4_0"]),
        ("gguf", "the model a/b:Q4_0", "gguf", ["pull", "a/b:Q4_0"]),
        ("prompt_toolkit", "nanovllm chat at a terminal", "cli", ["chat"]),
        ("rich", "nanovllm chat at a terminal", "cli", ["chat"]),
        ("markdown_it", "nanovllm chat at a terminal", "cli", ["chat"]),
        ("psutil", "nanovllm ps", "cli", ["ps"]),
        ("psutil", "nanovllm stop", "cli", ["stop"]),
        ("psutil", "nanovllm bench", "cli", ["bench", "--workload", "chat"]),
        ("psutil", "nanovllm tune", "cli", ["tune", "--workload", "chat"]),
        ("matplotlib", "--plot", "plot", ["timeline", "no-such-trace", "--plot", "no-such-folder/run.png"]),
        ("opentelemetry.sdk", "otlp_traces_endpoint", "otel", ["serve", "-m", "FOLDER", "--otlp-traces-endpoint", "http://x"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)  # fmt: skip
def test_a_command_without_a_library_names_it_with_its_extra(
    library, feature, extra, arguments, tiny_folder, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, library, None)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(sys, stream, StringIO())
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = [str(tiny_folder) if argument == "FOLDER" else argument for argument in arguments]
    assert main(given) == 2
    assert f"nanovllm: error: {feature} needs {library}: pip install 'nanovllm[{extra}]'." in capsys.readouterr().err


def test_a_gguf_file_without_its_library_names_the_extra_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingLibraryError, match=r"model\.gguf needs gguf: pip install 'nanovllm\[gguf\]'"):
        open_llm(str(path))


def test_a_form_without_its_library_is_refused_and_requests_go_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with open_llm() as llm:
        with pytest.raises(MissingLibraryError, match=r"structured_output needs llguidance: pip install"):
            generate(llm, [[1, 2]], SamplingParams(structured_output={"regex": "a+"}))
        assert len(generate(llm, [[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


TOOL = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    "field, fields",
    [
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": TOOL, "strict": True}}]}),
    ],
    ids=["response_format", "tools"],
)
def test_a_server_without_the_library_of_forms_refuses_the_request_alone(field, fields, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with serving() as running, running.http() as http:
        refused = http.post("/v1/chat/completions", json=body | fields)
        assert refused.status_code == 400, refused.text
        assert "needs llguidance: pip install 'nanovllm[structured]'" in refused.json()["error"]["message"]
        assert http.post("/v1/chat/completions", json=body).status_code == 200
