"""The front on Ray: takes HTTP requests, reads their prompts for the router, and relays a replica's answers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.core.config import EngineConfig
from nanovllm.model.loader import load_tokenizer
from nanovllm.ray.prompt import Prompt
from nanovllm.requests.chat import ChatTemplate
from nanovllm.server.answers.answer_format import answer_format, template_text
from nanovllm.server.answers.template_options import template_variables
from nanovllm.server.anthropic.protocol import MessagesRequest
from nanovllm.server.anthropic.translation import as_chat as messages_as_chat
from nanovllm.server.errors import ApiError, queue_full
from nanovllm.server.openai.protocol import ChatRequest, CompletionRequest
from nanovllm.server.openai.responses_input import as_chat as response_as_chat
from nanovllm.server.openai.responses_protocol import ResponsesRequest
from nanovllm.server.openai.turn import template_options
from nanovllm.server.security import ApiKeys, BodyGate, authorization_of
from nanovllm.server.settings import ServerSettings, request_salt
from nanovllm.server.sse import ClientGone, compact, event, until_disconnect
from nanovllm.server.strict import TELL_UNKNOWN

logger = logging.getLogger("nanovllm")

MAX_ATTEMPTS = 3  # replicas that a request is sent to, if each dies before its answer begins
FORWARDED = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path",
             "headers", "client", "server")  # fmt: skip


# The endpoints of conversations, each with what makes a chat request of its body.
_CHATS: dict[str, Callable[[bytes], ChatRequest]] = {
    "/v1/chat/completions": ChatRequest.model_validate_json,
    "/v1/messages": lambda body: messages_as_chat(MessagesRequest.model_validate_json(body)),
    "/v1/responses": lambda body: response_as_chat(ResponsesRequest.model_validate_json(body)),
}


class PromptReader:
    """Reads the prompt of a request's body as the engine will: its tokens and its cache salt.

    Args:
        model, tokenizer, engine_options: as for `AsyncLLM`; the weights are not loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | None,
        settings: ServerSettings,
        engine_options: dict[str, Any],
    ) -> None:
        config = EngineConfig.from_options(**engine_options)
        self._tokenizer = load_tokenizer(model, tokenizer, config)
        self._chat = ChatTemplate(self._tokenizer, allow_control_tokens=config.allow_control_tokens_in_messages)
        self._settings = settings
        self._format = answer_format(self._tokenizer, settings.tool_format, settings.reasoning_format)
        self._variables = template_variables(template_text(self._tokenizer))

    def read(self, path: str, key: str | None, body: bytes) -> Prompt:
        """The prompt, the first of several; one without tokens if the body has none, or a replica will refuse it.

        Args:
            key: the API key of the request.
        """
        # The replica logs unknown fields; here they must not keep the prompt from being read.
        TELL_UNKNOWN.set((lambda name: None) if self._settings.unknown_fields == "warn" else None)
        try:
            request: CompletionRequest | ChatRequest
            as_chat = next((read for end, read in _CHATS.items() if path.endswith(end)), None)
            if as_chat is not None:
                request = as_chat(body)
                options = template_options(request, self._variables, self._format)
                token_ids = self._chat.apply_to(request.conversation(), tools=request.callable_tools, **options)
            elif path.endswith("/v1/completions"):
                request = CompletionRequest.model_validate_json(body)
                first = request.prompts[0]
                token_ids = self._tokenizer(first)["input_ids"] if isinstance(first, str) else first
            else:
                return Prompt()
            token_ids = token_ids[-(request.truncate_prompt_tokens or 0) :]
            return Prompt(token_ids, request_salt(self._settings, key, request.cache_salt or ""))
        except Exception:  # the replica says what is wrong with it
            logger.debug("a prompt could not be read for routing", exc_info=True)
            return Prompt()


class Front:
    """ASGI application of one front; Serve runs `num_fronts` of them.

    Args:
        replicas: handle of the `Replica`s.
        model, tokenizer, settings, engine_options: as for them.
    """

    def __init__(
        self,
        replicas: DeploymentHandle,
        model: str,
        tokenizer: str | None,
        settings: ServerSettings,
        engine_options: dict[str, Any],
    ) -> None:
        self._replicas = replicas.options(stream=True)
        self._settings = settings
        self._keys = ApiKeys(settings.api_keys())
        self._prompts = PromptReader(model, tokenizer, settings, engine_options)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        gate = Middleware(BodyGate, keys=self._keys, max_bytes=self._settings.max_body_bytes)
        return Starlette(routes=[Mount("/", app=self._forward)], middleware=[gate])

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _read_body(receive)
            prompt = await asyncio.to_thread(self._prompts.read, scope["path"], self._key(scope), body)
            await until_disconnect(receive, self._relay(scope, body, prompt, send))
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
        except ClientGone:
            logger.debug("a client left before its answer ended")

    def _key(self, scope: Scope) -> str | None:
        try:
            return self._keys.check(authorization_of(Headers(scope=scope)))
        except ApiError:  # some endpoints are open
            return None

    async def _relay(self, scope: Scope, body: bytes, prompt: Prompt, send: Send) -> None:
        """Send a request to a replica, to another one if that dies before its answer begins, and pass on the answer."""
        forwarded = {name: scope[name] for name in FORWARDED if name in scope}
        answer = _Answer(send)
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            response = self._replicas.answer.remote(forwarded, body, prompt=prompt)
            try:
                async for messages in response:
                    await answer.pass_on(messages)
                return
            except BackPressureError:
                raise queue_full() from None
            except RayActorError as error:
                logger.warning("a replica died while it answered %s: %s", scope["path"], error)
                if answer.has_begun:
                    await answer.break_off()
                    return
                if not attempts_left:
                    raise _replica_died() from error
            finally:
                response.cancel()  # does nothing once it has ended


class _Answer:
    """A response on its way to the client."""

    def __init__(self, send: Callable[[Message], Awaitable[None]]) -> None:
        self._send, self.has_begun, self._is_stream = send, False, False

    async def pass_on(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message["type"] == "http.response.start":
                self._is_stream = (
                    Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
                )
            self.has_begun = True
            await self._send(message)

    async def break_off(self) -> None:
        """End a stream whose replica died by an event with the error; raises for an answer that is not streamed."""
        if not self._is_stream:
            raise _replica_died()
        last = event(compact(_replica_died().body()))
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


def _replica_died() -> ApiError:
    return ApiError(
        503, "the replica that answered has died; send the request again.", code="replica_died",
        headers={"Retry-After": "1"},
    )  # fmt: skip


async def _read_body(receive: Receive) -> bytes:
    """The whole body; raises ClientGone if the client leaves before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
