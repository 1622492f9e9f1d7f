"""Pauses, sleep and updates of weights by vLLM's names and fields: new weights come from files below one folder."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field, field_validator
from safetensors import safe_open
from torch import Tensor

from nanovllm.features.updates import pausing
from nanovllm.features.updates.versions import MAX_LENGTH, weights_version
from nanovllm.models.headers import INDEX, weight_files
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.server.adapters import path_in
from nanovllm.serving.server.body_limits import LimitedRoute
from nanovllm.serving.server.errors import ANSWERS, ApiError, ErrorAnswer
from nanovllm.serving.server.security import require_api_key
from nanovllm.serving.server.state import server_state
from nanovllm.serving.server.strict import Strict

FIELD = "update_info.path"
TAGS = frozenset({"weights", "kv_cache"})  # parts of a sleeping vLLM that can be woken
_TRANSFERS = ("names", "dtype_names", "shapes", "packed", "packed_buffer_size_bytes", "packed_num_buffers")
_NO_TRANSFER = "weights are read from files, and neither NCCL nor IPC handles are built. Send backend and path"


async def _is_allowed(request: Request) -> None:
    """Raise ApiError (403) without the flag, which needs a key."""
    if not server_state(request).settings.allow_weight_updates:
        raise ApiError(
            403, "this server's weights are not updated by requests. Start it with --allow-weight-updates and a key."
        )


router = APIRouter(dependencies=[Depends(require_api_key), Depends(_is_allowed)], route_class=LimitedRoute)
REFUSALS: dict[int | str, dict[str, Any]] = ANSWERS | {
    403: {"model": ErrorAnswer, "description": "no weights of --weights-folder"}
}


class PauseQuery(Strict):
    """Query of /pause. mode: keep lets running requests wait with their KV."""

    mode: Literal["keep"] = "keep"


class SleepQuery(Strict):
    """Query of /sleep. level: 1 gives the KV memory back, 2 a GPU's weights too; mode: keep lets requests wait."""

    level: Literal["1", "2"] = "1"
    mode: Literal["keep"] = "keep"


class WakeQuery(Strict):
    """Query of /wake_up. tags: none, or all that vLLM has."""

    tags: list[str] = Field(default=[*TAGS])

    @field_validator("tags")
    @classmethod
    def _are_all(cls, tags: list[str]) -> list[str]:
        if {*tags} != TAGS:
            raise ValueError("weights and kv_cache wake together. Name both, or neither")
        return tags


class UpdateInfo(Strict):
    """Source of weights. path: name of a folder directly in --weights-folder."""

    refused: ClassVar = dict.fromkeys((*_TRANSFERS, "ipc_handles", "ipc_handles_pickled"), ((), _NO_TRANSFER))

    backend: Literal["safetensors"]
    path: str = Field(min_length=1)


class UpdateWeightsRequest(Strict):
    """Body of /update_weights. version: label of the weights; keep_kv: let running requests go on from their KV."""

    update_info: UpdateInfo
    version: str | None = Field(default=None, max_length=MAX_LENGTH)
    keep_kv: bool = False


@router.post("/pause", responses=REFUSALS, summary="Compute nothing until /resume; requests wait")
async def pause(query: Annotated[PauseQuery, Query()], request: Request) -> dict[str, str]:
    await _asked(request, AsyncLLM.pause_generation)
    return {"status": "paused"}


@router.post("/resume", responses=REFUSALS, summary="Go on after /pause")
async def resume(request: Request) -> dict[str, str]:
    await _asked(request, AsyncLLM.resume_generation)
    return {"status": "resumed"}


@router.get("/is_paused", responses=REFUSALS, summary="Whether the engine is paused, and the version of its weights")
async def is_paused(request: Request) -> dict[str, Any]:
    paused, version = await _asked(
        request, lambda llm: llm.inspect(lambda engine: (pausing.is_paused(engine), weights_version(engine)))
    )
    return {"is_paused": paused, "weights_version": version}


@router.post("/sleep", responses=REFUSALS, summary="Give memory back until /wake_up; running requests wait")
async def sleep(query: Annotated[SleepQuery, Query()], request: Request) -> dict[str, str]:
    await _asked(request, lambda engine: engine.sleep(int(query.level)))
    return {"status": "asleep"}


@router.post("/wake_up", responses=REFUSALS, summary="Take the memory again, and go on")
async def wake_up(query: Annotated[WakeQuery, Query()], request: Request) -> dict[str, str]:
    await _asked(request, AsyncLLM.wake)
    return {"status": "awake"}


@router.get("/is_sleeping", responses=REFUSALS, summary="Whether the engine sleeps")
async def is_sleeping(request: Request) -> dict[str, bool]:
    return {"is_sleeping": server_state(request).engine.is_asleep}


async def _asked(request: Request, call: Callable[[Any], Awaitable[Any]]) -> Any:
    state = server_state(request)
    try:
        return await call(state.engine)
    except Exception as error:
        raise state.admission.api_error(error, ()) from error


@router.post("/update_weights", responses=REFUSALS, summary="Replace weights by those of files, all of them or none")
async def update_weights(body: UpdateWeightsRequest, request: Request) -> dict[str, Any]:
    state = server_state(request)
    try:
        state.admission.check()
        async with state.loading_turn:
            weights = await asyncio.to_thread(_read, state.settings.weights_folder, body.update_info.path)
            await state.engine.update_weights(weights, keep_kv=body.keep_kv, version=body.version)
    except Exception as error:
        raise state.admission.api_error(error, body.names()) from error
    return {"message": "Weights updated", "version": body.version}


def _read(root: str | None, given: str) -> dict[str, Tensor]:
    """The tensors of a folder's safetensors files by name, on the CPU; raises ApiError (403 or 400)."""
    if root is None:
        raise ApiError(403, "this server reads no weights. Start it with --weights-folder DIR.", param=FIELD)
    where = {"field": FIELD, "flag": "--weights-folder"}
    path = path_in(root, given, [INDEX], **where)
    weights: dict[str, Tensor] = {}
    try:
        files = [file for file in weight_files(Path(path)) if file.is_file()]
        path_in(root, given, map(str, files), **where)
        for file in files:
            weights |= _copied(file)
    except ApiError:
        raise
    except Exception as error:  # the library raises its own errors
        raise ApiError(400, f"{FIELD}: the files of {path} cannot be read: {error}", param=FIELD) from error
    if not weights:
        raise ApiError(400, f"{FIELD}: {path} holds no weights in safetensors files. Save them there.", param=FIELD)
    return weights


def _copied(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, which may lie in tmpfs; raises ValueError if it changes meanwhile."""
    # One copy, which is mapped: if a trainer truncates its own file, a mapping of that loses pages and ends the process
    # (SIGBUS); if it writes into it, the weights are of two versions.
    copy = os.memfd_create("nanovllm-weights")
    try:
        path = f"/proc/self/fd/{copy}"
        before = _state(file)
        shutil.copyfile(file, path)
        if _state(file) != before:
            raise ValueError(f"{file.name} has changed meanwhile. Save it under another name, and rename its folder.")
        with safe_open(path, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    finally:
        os.close(copy)


def _state(file: Path) -> tuple[int, ...]:
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
