"""/v1/load_lora_adapter and /v1/unload_lora_adapter: adapters of one folder come and go, by vLLM's calls."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from nanovllm.serving.server.adapters import load_adapter, path_in
from nanovllm.serving.server.body_limits import LimitedRoute
from nanovllm.serving.server.errors import ANSWERS, ApiError, ErrorAnswer
from nanovllm.serving.server.security import require_api_key
from nanovllm.serving.server.state import ServerState, server_state
from nanovllm.serving.server.strict import Strict

router = APIRouter(dependencies=[Depends(require_api_key)], route_class=LimitedRoute, default_response_class=Response)
REFUSALS: dict[int | str, dict[str, Any]] = ANSWERS | {
    403: {"model": ErrorAnswer, "description": "no adapter of --adapter-folder"}
}
Name = Annotated[str, Field(min_length=1)]


class LoadAdapterRequest(Strict):
    """Body of /v1/load_lora_adapter. load_inplace: replace the adapter that has the name."""

    lora_name: Name
    lora_path: Name
    load_inplace: bool = False


class UnloadAdapterRequest(Strict):
    """Body of /v1/unload_lora_adapter."""

    hints: ClassVar = {"lora_int_id": "an adapter is known by its name"}

    lora_name: Name


def _folder(state: ServerState) -> str:
    """The folder of adapters that requests may load; raises ApiError (403) without one."""
    if (folder := state.settings.adapter_folder) is None:
        raise ApiError(403, "this server changes no adapters by request. Start it with --adapter-folder DIR.")
    return folder


@router.post("/v1/load_lora_adapter", responses=REFUSALS, summary="Load an adapter of --adapter-folder")
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> Response:
    state = server_state(request)
    try:
        with state.admission.open_answer():
            path = await asyncio.to_thread(path_in, _folder(state), body.lora_path)
            await load_adapter(state, body.lora_name, path, replaces=body.load_inplace)
    except Exception as error:
        raise state.admission.api_error(error, body.names()) from error
    request.app.openapi_schema = None  # it lists the names of adapters
    return PlainTextResponse(f"Success: the adapter {body.lora_name!r} is loaded.")


@router.post("/v1/unload_lora_adapter", responses=REFUSALS, summary="Unload an adapter, which open requests keep")
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
    state = server_state(request)
    _folder(state)
    name = body.lora_name
    try:
        with state.admission.open_answer():
            if name not in (adapters := state.engine.adapters):
                loaded = ", ".join(map(repr, adapters)) or "none"
                raise ApiError(404, f"no adapter is named {name!r}; loaded are: {loaded}.", param="lora_name")
            await state.engine.unload_adapter(name)
    except Exception as error:
        raise state.admission.api_error(error, body.names()) from error
    request.app.openapi_schema = None
    return PlainTextResponse(f"Success: the adapter {name!r} is unloaded.")
