"""The served model in Ollama's lists, embeddings, and the calls that would change models, which are refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from huggingface_hub import try_to_load_from_cache
from starlette.responses import Response

from nanovllm.errors import ModelLoadError
from nanovllm.features.sampling_params import EmbeddingParams
from nanovllm.models.default_model import DEFAULT_MODEL, default_folder
from nanovllm.models.quantised.stored_config import checkpoint_of
from nanovllm.models.sizes import read_sizes
from nanovllm.models.source import is_gguf
from nanovllm.serving.server.answers.answer_format import template_text
from nanovllm.serving.server.errors import ApiError
from nanovllm.serving.server.ollama import generating
from nanovllm.serving.server.ollama.generating import OllamaRoute
from nanovllm.serving.server.ollama.protocol import EmbedBody, EmbeddingsBody, ShowBody
from nanovllm.serving.server.ollama.translation import now
from nanovllm.serving.server.openai.embeddings import EmbeddingRequest, PoolingJob, encode_numbers, vectors, with_rows
from nanovllm.serving.server.openai.translated import translated
from nanovllm.serving.server.security import require_api_key
from nanovllm.serving.server.sse import compact
from nanovllm.serving.server.state import ServerState, server_state

API_VERSION = "0.13.0"  # version of Ollama's API below /api, which some clients compare with a smallest one
FOREVER = "2318-01-01T00:00:00Z"  # expires_at of a model that stays loaded
CHANGES = ("pull", "push", "create", "copy", "delete")

router = APIRouter(dependencies=[Depends(require_api_key)], route_class=OllamaRoute, include_in_schema=False)
open_router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model's files; empty where they are not known.

    size: bytes of the weights.
    num_weights: 0 if not known.
    """

    format: str = ""
    family: str = ""
    size: int = 0
    quantization: str = ""
    num_weights: int = 0

    def details(self) -> dict[str, Any]:
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": [self.family] if self.family else [],
            "parameter_size": _in_words(self.num_weights),
            "quantization_level": self.quantization,
        }


def model_facts(model: str | os.PathLike[str]) -> ModelFacts:
    """Read the facts of the embedded model, a folder, a GGUF file, or a hub model in the cache."""
    path = _files_of(os.fspath(model))
    if is_gguf(path):
        level = re.search(r"(?i)(?:I?Q\d\w*|B?F16|F32)(?=\.gguf$)", path.name)
        size = path.stat().st_size if path.exists() else 0
        return ModelFacts("gguf", "", size, "" if level is None else level[0].upper())
    if not (path / "config.json").is_file():
        return ModelFacts()
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    dtype = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    checkpoint = checkpoint_of(config)
    plain = dtype.get(config.get("dtype", config.get("torch_dtype")), "")
    return ModelFacts(
        "safetensors",
        str(config.get("model_type", "")),
        size,
        plain if checkpoint is None else checkpoint.method.upper(),
        _num_weights(path),
    )


def _files_of(model: str) -> Path:
    """Path of a loaded model's files; one that does not exist if they are not known."""
    if model == DEFAULT_MODEL:
        return default_folder()
    path = Path(model).expanduser()
    cached = None
    if not path.exists():
        with suppress(ValueError):  # no id of a model: a path, or an id with the name of a quantisation
            cached = try_to_load_from_cache(model, "config.json")
    return Path(cached).parent if isinstance(cached, str) else path


def _num_weights(folder: Path) -> int:
    try:
        return read_sizes(str(folder)).num_weights
    except (ModelLoadError, ValueError, KeyError, OSError):
        return 0


def _in_words(num_weights: int) -> str:
    """A number of weights as Ollama writes it: 135M, 7.6B."""
    billions = num_weights / 1e9
    return f"{billions:.1f}B" if billions >= 1 else f"{1e3 * billions:.0f}M" if num_weights else ""


def attach(app: FastAPI, state: ServerState, model: str | os.PathLike[str]) -> None:
    """Serve Ollama's API of one model, a folder, a file or an id."""
    app.state.ollama_facts, app.state.ollama_begun = model_facts(model), now()
    for endpoints in (generating.router, router, open_router):
        app.include_router(endpoints)


def _entry(request: Request, name: str) -> dict[str, Any]:
    facts = request.app.state.ollama_facts
    return {
        "name": name,
        "model": name,
        "size": facts.size,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(request, name),
    }


def _details(request: Request, name: str) -> dict[str, Any]:
    state = server_state(request)
    parent = "" if name in state.model_names else state.model_name
    details: dict[str, Any] = request.app.state.ollama_facts.details()
    return details | {"parent_model": parent}


@open_router.api_route("/", methods=["GET", "HEAD"])  # Ollama's clients look for a server by HEAD
async def root(request: Request) -> Response:
    if request.method == "GET":
        raise ApiError(404, "there is no page: this server runs without its live view.")
    return Response()


@router.api_route("/api/version", methods=["GET", "HEAD"])
async def version() -> dict[str, str]:
    return {"version": API_VERSION}


@router.api_route("/api/tags", methods=["GET", "HEAD"])
async def tags(request: Request) -> dict[str, Any]:
    begun = request.app.state.ollama_begun
    return {"models": [_entry(request, name) | {"modified_at": begun} for name in server_state(request).names]}


@router.api_route("/api/ps", methods=["GET", "HEAD"])
async def running_models(request: Request) -> dict[str, Any]:
    state = server_state(request)
    loaded = {"expires_at": FOREVER, "size_vram": 0, "context_length": state.engine.config.max_model_len}
    return {"models": [_entry(request, name) | loaded for name in (state.model_name, *state.engine.adapters)]}


@router.post("/api/show")
async def show(body: ShowBody, request: Request) -> dict[str, Any]:
    state = server_state(request)
    facts = request.app.state.ollama_facts
    name = state.resolve(body.model or body.name)
    family = facts.family or "model"
    return {
        "modelfile": f"FROM {state.model_name}",
        "parameters": "",
        "template": template_text(state.engine.tokenizer),
        "details": _details(request, name),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": state.engine.config.max_model_len,
            f"{family}.vocab_size": state.engine.vocab_size,
        },
        "capabilities": state.capabilities,
        "modified_at": request.app.state.ollama_begun,
    }


@router.post("/api/embed")
async def embed(body: EmbedBody, request: Request) -> Response:
    begin = time.monotonic()
    if not body.input:
        return _answer({"model": server_state(request).resolve(body.model), "embeddings": []})
    job, given = _pooling(request, "input", model=body.model, input=body.input, dimensions=body.dimensions)

    async def work() -> str:
        found = await vectors(job, given, EmbeddingParams())
        head = {
            "model": job.model,
            "total_duration": round(1e9 * (time.monotonic() - begin)),
            "load_duration": 0,
            "prompt_eval_count": job.usage["prompt_tokens"],
        }
        return await with_rows(head, "embeddings", map(encode_numbers, found))

    return await job.answer(work())


@router.post("/api/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    if not body.prompt:
        server_state(request).resolve(body.model)
        return _answer({"embedding": []})
    job, given = _pooling(request, "prompt", model=body.model, input=body.prompt)

    async def work() -> str:
        (vector,) = await vectors(job, given, EmbeddingParams())
        return f'{{"embedding":{encode_numbers(vector)}}}'

    return await job.answer(work())


def _answer(given: dict[str, Any]) -> Response:
    """Answer without a call of the engine: no input asks whether the model is loaded."""
    return Response(compact(given), media_type="application/json")


def _pooling(request: Request, param: str, **fields: Any) -> tuple[PoolingJob, EmbeddingRequest]:
    """The job of an embedding request with these fields; raises ApiError that names `param` for `input`."""
    with translated({"input": param}, EmbeddingRequest.names()):
        given = EmbeddingRequest(**fields)
        job = PoolingJob(server_state(request), request, given, "embd")
        job.check_texts(param, given.prompts)
    return job, given


@router.api_route("/api/{call}", methods=["POST", "DELETE"])
@router.api_route("/api/{call}/{rest:path}", methods=["POST", "DELETE", "HEAD"])
async def refuse_change(request: Request, call: str, rest: str = "") -> None:
    """Refuse calls that would change the models of this machine; raises ApiError (403 or 404)."""
    if request.method == "HEAD":
        raise ApiError(404, "no file is kept here.")
    if call in (*CHANGES, "blobs"):
        raise ApiError(
            403,
            f"/api/{call} is not served: a server keeps the one model that it was started with. Use nanovllm models "
            "and nanovllm serve on its machine.",
            code="not_served",
        )
    raise ApiError(404, f"Ollama's API here has no /api/{call}.", code="not_found")
