"""Builds sdist and wheel, installs the wheel outside of the checkout, and runs it: help, generate, serve, kernels.

A second installation has the wheel's dependencies alone, without those of any extra.

    python .ci/wheel.py

Both environments borrow the dependencies of the one that runs this file, so they are made in a second. The model is
tiny, random and on disk; all caches begin empty.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import queue
import re
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
import tomllib
import urllib.request
import zipfile
from pathlib import Path
from typing import IO

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "Once upon a time there was"
MAX_TOKENS = 8
DEADLINE_S = 300.0  # for each command; generous, since they compile
ANSWER_S = 60.0
LAST_LINES = 20  # of a server that failed


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        wheel, sdist = build(work)
        check_contents(wheel)
        check_metadata(work, wheel, sdist)
        check_sdist(sdist, wheel, work)
        scripts = install(wheel, work / "environment")
        model = save_model(work / "model")
        environ = clean_environ(work / "cache")
        check_help(scripts, work, environ)
        text = generate(scripts, model, work, environ)
        libraries = sorted(path.name.split("-")[0] for path in (work / "cache").glob("nanovllm/kernels/*.so"))
        if libraries != ["kernels", "sampling"]:
            raise SystemExit(f"generate left the kernel libraries {libraries} in an empty cache; it must build two.")
        served = serve(scripts, model, work, environ)
        check_bare(wheel, model, text, work, environ)
    if served != text:
        raise SystemExit(f"the server answers {served!r} where generate prints {text!r}.")
    print(
        f"{sdist.name} builds {wheel.name}, which built its kernels, generated and served the same {MAX_TOKENS} "
        "tokens, and generated them without any extra"
    )


def build(work: Path) -> tuple[Path, Path]:
    """The wheel and the sdist, by the build system that pyproject.toml names; with twine in a folder of its own."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(work / "tools"), *requires, "twine>=6"])
    run_build(work, ROOT, work / "dist")
    (wheel,), (sdist,) = (work / "dist").glob("nanovllm-*.whl"), (work / "dist").glob("nanovllm-*.tar.gz")
    return wheel, sdist


def run_build(work: Path, source: Path, folder: Path) -> None:
    environ = dict(os.environ) | {"PYTHONPATH": str(work / "tools")}
    run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=source, environ=environ)


def check_metadata(work: Path, wheel: Path, sdist: Path) -> None:
    """An index takes both, and shows a description that has no link into the repository."""
    environ = dict(os.environ) | {"PYTHONPATH": str(work / "tools")}
    run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)], environ=environ)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        description = archive.read(name).decode()
    if found := re.findall(r"\]\((?!https?://)[^)]*\)|<picture>|<img", description):
        raise SystemExit(f"the description of {wheel.name} has {found[0]}, which leads nowhere on an index's page.")


def check_contents(wheel: Path) -> None:
    """Every file of the package is in the wheel: pages, C++ sources and py.typed too."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "nanovllm").rglob("*") if path.is_file()}
    missing = sorted(file for file in files - packed if "__pycache__" not in file)
    if missing:
        raise SystemExit(f"{wheel.name} lacks {', '.join(missing)}.")
    for pattern in ("nanovllm/py.typed", "nanovllm/observability/pages/", "nanovllm/fast/kernels/csrc/"):
        if not any(name.startswith(pattern) for name in packed):
            raise SystemExit(f"{wheel.name} has nothing under {pattern}.")


def check_sdist(sdist: Path, wheel: Path, work: Path) -> None:
    """It holds what tests and documentation need, and builds the same wheel, byte for byte of each file."""
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "source", filter="data")
    (source,) = (work / "source").iterdir()
    needed = ("README.md", "LICENSE", "CHANGELOG.md", "mkdocs.yml", "tests/conftest.py", "docs/index.md", ".ci/run")
    examples = [str(path.relative_to(ROOT)) for path in (ROOT / "examples").iterdir() if path.is_file()]
    missing = [name for name in (*needed, *examples) if not (source / name).is_file()]
    if missing:
        raise SystemExit(f"{sdist.name} lacks {', '.join(missing)}.")
    run_build(work, source, work / "again")
    if contents(work / "again" / wheel.name) != contents(wheel):
        raise SystemExit(f"{sdist.name} builds another wheel than the checkout does.")


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def check_help(scripts: Path, work: Path, environ: dict[str, str]) -> None:
    """The command names its commands and its version, which is the wheel's."""
    text = run([str(scripts / "nanovllm"), "--help"], cwd=work, environ=environ)
    version = run([str(scripts / "nanovllm"), "--version"], cwd=work, environ=environ).split()[1]
    if "generate" not in text or not list((work / "dist").glob(f"nanovllm-{version}-*.whl")):
        raise SystemExit(f"nanovllm {version} says of itself: {text}")


def install(wheel: Path, environment: Path, *, is_bare: bool = False) -> Path:
    """A new environment with the wheel and this one's packages; returns its scripts' folder.

    Args:
        is_bare: whether the packages are those that the wheel needs without an extra, or all, behind it on the path.
    """
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)])
    variables = {"base": str(environment), "platbase": str(environment)}
    own = Path(sysconfig.get_path("purelib", "venv", variables))
    if is_bare:
        link_requirements(own)
    else:
        borrowed = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        (own / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed), encoding="utf-8")
    environ = clean_environ(environment)
    where = run([str(python), "-c", "import nanovllm; print(nanovllm.__file__)"], cwd=environment, environ=environ)
    if not Path(where.strip()).is_relative_to(own):
        raise SystemExit(f"nanovllm is imported from {where.strip()}, not from {own}.")
    return environment / "bin"


def link_requirements(packages: Path) -> None:
    """Link this environment's distributions that the wheel in a folder needs without an extra, and those they need."""
    (wheel,) = importlib.metadata.distributions(name="nanovllm", path=[str(packages)])
    pending, found = list(wheel.requires or ()), set()
    while pending:
        requirement = Requirement(pending.pop())
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(requirement.name)
        distribution = importlib.metadata.distribution(requirement.name)
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            raise SystemExit(f"{requirement} is needed, and {distribution.version} is installed.")
        pending += distribution.requires or ()
        for name in {path.parts[0] for path in distribution.files or ()} - {".."}:
            if not (packages / name).exists():
                (packages / name).symlink_to(distribution.locate_file(name))


# A module in training, text prompts, and a request that needs an extra, after which the engine goes on.
LOADED_MODULE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from nanovllm import LLM, SamplingParams, StructuredOutput

module = AutoModelForCausalLM.from_pretrained(sys.argv[1])
params = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[3]))
with LLM(module, tokenizer=AutoTokenizer.from_pretrained(sys.argv[1])) as llm:
    try:
        llm.generate(sys.argv[2], SamplingParams(structured_output=StructuredOutput(regex="a+")))
    except ValueError as error:
        print(error, file=sys.stderr)
    print(llm.generate(sys.argv[2], params)[0].outputs[0].text, end="")
"""
# Commands that need an extra -> its name.
REFUSED = {
    ("serve",): "serve",
    ("run-batch", "--input-file", "a", "--output-file", "b"): "serve",
    ("generate", "--regex", "a+", PROMPT): "structured",
    ("generate", PROMPT): "gguf",  # the default model
    ("ps",): "cli",
}


def check_bare(wheel: Path, model: Path, text: str, work: Path, environ: dict[str, str]) -> None:
    """Without any extra the command and a loaded module generate the same text; what needs one says which."""
    scripts = install(wheel, work / "bare", is_bare=True)
    check_help(scripts, work, environ)
    if (found := generate(scripts, model, work, environ)) != text:
        raise SystemExit(f"without any extra generate prints {found!r}, not {text!r}.")
    command = [str(scripts / "python"), "-c", LOADED_MODULE, str(model), PROMPT, str(MAX_TOKENS)]
    done = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.stdout != text or "pip install 'nanovllm[structured]'" not in done.stderr:
        raise SystemExit(f"without any extra a loaded module answers {done.stdout!r}, not {text!r}:\n{done.stderr}")
    before = sorted((work / "cache").rglob("*"))
    for arguments, extra in REFUSED.items():
        command = [str(scripts / "nanovllm"), *arguments]
        done = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode != 2 or f"pip install 'nanovllm[{extra}]'" not in done.stderr:
            raise SystemExit(f"without its extra {' '.join(arguments)} ends with {done.returncode}:\n{done.stderr}")
    if sorted((work / "cache").rglob("*")) != before:
        raise SystemExit(f"commands that were refused have left something in {work / 'cache'}.")


def clean_environ(cache: Path) -> dict[str, str]:
    """The environment's variables without a way back into the checkout, or to any cache or hub."""
    dropped = ("PYTHONPATH", "NANOVLLM_CACHE", "NANOVLLM_API_KEY")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}


def save_model(folder: Path) -> Path:
    sys.path.insert(0, str(ROOT))
    from tests.support.tiny_models import save_tiny

    return save_tiny(folder)


def generate(scripts: Path, model: Path, work: Path, environ: dict[str, str]) -> str:
    """The text that `nanovllm generate` prints, on the C++ kernels."""
    command = [
        str(scripts / "nanovllm"),
        "generate",
        "--raw",
        PROMPT,
        "--model",
        str(model),
        "--max-tokens",
        str(MAX_TOKENS),
    ]
    printed = run([*command, "--attention-backend", "cpp", "--device", "cpu", "--json"], cwd=work, environ=environ)
    answer = json.loads(printed)
    if len(answer["token_ids"]) != MAX_TOKENS or answer["finish_reason"] != "length":
        raise SystemExit(f"generate answered {answer}, not {MAX_TOKENS} tokens.")
    return answer["text"]


def serve(scripts: Path, model: Path, work: Path, environ: dict[str, str]) -> str:
    """What `nanovllm serve` answers, on a free port; its page is fetched too, and SIGTERM ends it with status 0."""
    command = [str(scripts / "nanovllm"), "serve", "--model", str(model), "--port", "0", "--served-model-name", "tiny"]
    command += ["--attention-backend", "cpp", "--device", "cpu"]
    server = subprocess.Popen(command, cwd=work, env=environ, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=collect_lines, args=(server.stderr, lines), daemon=True).start()
    try:
        url = wait_for_url(lines)
        page = fetch(url)
        if b"<html" not in page:
            raise SystemExit(f"the page at {url} begins with {page[:80]!r}.")
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
        answer = json.loads(fetch(f"{url}/v1/completions", body))
        server.send_signal(signal.SIGTERM)
        status = server.wait(ANSWER_S)
    finally:
        server.kill()
        server.wait()
    if status != 0:
        raise SystemExit(f"the server ended with status {status} after SIGTERM.")
    return answer["choices"][0]["text"]


def collect_lines(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def wait_for_url(lines: queue.Queue[str | None]) -> str:
    """The address that the server logs once it listens."""
    seen = []
    deadline = time.monotonic() + DEADLINE_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            break
        if line is None:
            break
        seen.append(line)
        if "running on " in line:
            return line.split("running on ")[1].split()[0]
    raise SystemExit("the server did not start. Its last lines:\n" + "".join(seen[-LAST_LINES:]))


def fetch(url: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=ANSWER_S) as response:
        return response.read()


def run(command: list[str], *, cwd: Path | None = None, environ: dict[str, str] | None = None) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
