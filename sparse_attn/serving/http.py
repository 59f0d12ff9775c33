"""An OpenAI-compatible endpoint of an engine, with Starlette: completions, chat, models, metrics, health.

A client that goes ends its request. A client that reads slowly holds up nobody: its tokens wait for it, at most as many
as it asked for. A full queue is answered by 429, an engine that ends or a wait that became too long by 503.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any
from uuid import uuid4

import torch
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from .engine import Engine
from .runner import Sampling
from .scheduler import Event, Refused, Request

STATUS = {"infeasible": 400, "queue": 429, "overdue": 503, "closed": 503}
"""Of refusals, by reason."""
RETRY_AFTER = "1"
"""Seconds after which a refused client may try again."""
FIELDS: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "stream": bool,
    "stream_options": dict,
    "max_tokens": int,
    "max_completion_tokens": int,
    "temperature": (int, float),
    "top_p": (int, float),
    "seed": int,
    "share": (int, float, str),
    "user": str,
}
"""What a request may have besides its prompt or messages. ``share`` is an extension: of what generated tokens see, how
much they attend."""
DEFAULTS = {"n": 1, "best_of": 1, "echo": False, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0}
"""What clients send though it changes nothing. Other values are refused."""
SEEDS = range(-(2**63), 2**64)
"""That a generator of torch takes."""


class BadRequest(ValueError):
    """A request that is wrong, with what was expected."""


@dataclass(frozen=True)
class Served:
    """A model as it is served.

    ``chat`` gives the tokens of messages. ``longest``: tokens of prompt and output that the model can have. ``stop``:
    tokens that end an answer. ``decoder`` makes a function from a token to the text that it adds, None if incomplete.
    ``shares``: those that a request may name besides 1, which is dense; the first is that of requests that name none.
    """

    name: str
    encode: Callable[[str], list[int]]
    chat: Callable[[list[dict[str, Any]]], list[int]]
    decoder: Callable[[], Callable[[int], str | None]]
    longest: int
    vocabulary: int
    stop: frozenset[int]
    shares: tuple[Fraction, ...] = (Fraction(1, 4),)

    @property
    def named_shares(self) -> dict[str, Fraction]:
        """What a request may name, as text."""
        return {str(share): share for share in (*self.shares, Fraction(1))}


class Answer:
    """A request of a client, and its tokens as they come."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine, self.request = engine, request
        self._events: asyncio.Queue[Event | Refused] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listener(what: Event | Refused) -> None:
            loop.call_soon_threadsafe(self._events.put_nowait, what)

        engine.submit(request, listener)

    async def next(self) -> Event:
        """Raises ``Refused``."""
        what = await self._events.get()
        if isinstance(what, Refused):
            raise what
        return what

    def close(self) -> None:
        self.engine.cancel(self.request.name)


class Endpoint:
    """The routes."""

    def __init__(self, engine: Engine, served: Served, registry: Any) -> None:
        self.engine, self.served, self.registry = engine, served, registry
        self._created = int(time.time())

    def app(self, lifespan: Any = None) -> Starlette:
        """``lifespan``: what runs while it does."""
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/metrics", self.metrics),
            Route("/health", self.health),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def models(self, _: HttpRequest) -> Response:
        model = {"id": self.served.name, "object": "model", "created": self._created, "owned_by": "sparse_attn"}
        model["shares"] = [*self.served.named_shares]
        return JSONResponse({"object": "list", "data": [model]})

    async def metrics(self, _: HttpRequest) -> Response:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def health(self, _: HttpRequest) -> Response:
        """200 while requests are taken."""
        status = self.engine.status
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, "prompt")

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, "messages")

    async def _answer(self, http: HttpRequest, asked: str) -> Response:
        answer = None
        try:
            body = await self._body(http, asked)
            request = self._request(body, self._tokens(body[asked], asked))
            answer = Answer(self.engine, request)
            # refusals of those that wait have a status of their own, so nothing is sent before the first token
            first = await self._unless_gone(http, answer)
        except BadRequest as error:
            return _error(400, "invalid_request_error", str(error))
        except Refused as error:
            kind = "invalid_request_error" if error.reason == "infeasible" else "overloaded_error"
            return _error(STATUS[error.reason], kind, str(error))
        if first is None:
            return Response(status_code=499)
        form = _Form(asked == "messages", self.served.name, request.prompt)
        if body.get("stream"):
            usage = bool(body.get("stream_options", {}).get("include_usage"))
            return _Stream(answer, self._stream(answer, first, form, usage))
        return await self._whole(http, answer, first, form)

    # --- What a client asks

    async def _body(self, http: HttpRequest, asked: str) -> dict[str, Any]:
        try:
            body = await http.json()
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"body: expected JSON: {error}") from None
        if not isinstance(body, dict) or asked not in body:
            raise BadRequest(f"body: expected an object with {asked}")
        body = {name: value for name, value in body.items() if value is not None or name == asked}
        for name, value in body.items():
            if name == asked:
                continue
            if name in DEFAULTS:
                default = DEFAULTS[name]
                if value != default or isinstance(value, bool) != isinstance(default, bool):
                    raise BadRequest(f"{name}: expected {default}, as others are not supported, got {value!r}")
                continue
            if name not in FIELDS:
                raise BadRequest(f"field: expected one of {', '.join([asked, *sorted(FIELDS)])}, got {name!r}")
            wanted = FIELDS[name]
            if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
                raise BadRequest(f"{name}: expected {getattr(wanted, '__name__', 'a number')}, got {value!r}")
        if body.get("model") not in (None, self.served.name):
            raise BadRequest(f"model: expected {self.served.name!r}, got {body['model']!r}")
        return body

    def _tokens(self, asked: Any, name: str) -> list[int]:
        if name == "messages":
            if not isinstance(asked, list) or not all(map(_is_message, asked)):
                raise BadRequest(f"messages: expected objects with role and content, both texts, got {asked!r:.80}")
            try:
                return self.served.chat(asked)
            except Exception as error:  # noqa: BLE001 - a chat template raises whatever its author chose
                raise BadRequest(f"messages: expected what the model's chat template takes: {error}") from None
        if isinstance(asked, str):
            if not _is_text(asked):
                raise BadRequest("prompt: expected Unicode text, got half of a surrogate pair")
            return self.served.encode(asked)
        if isinstance(asked, list) and asked and all(type(token) is int for token in asked):
            if min(asked) >= 0 and max(asked) < self.served.vocabulary:
                return list(asked)
            raise BadRequest(f"prompt: expected tokens of 0 to {self.served.vocabulary - 1}, got others")
        raise BadRequest("prompt: expected a text, or a list of tokens; send several prompts as several requests")

    def _request(self, body: Mapping[str, Any], tokens: list[int]) -> Request:
        longest = self.served.longest
        room = longest - len(tokens)
        if not tokens or room < 1:
            raise BadRequest(f"prompt: expected 1 to {longest - 1} tokens, got {len(tokens)}")
        output = body.get("max_completion_tokens", body.get("max_tokens", min(room, 256)))
        if not 1 <= output <= room:
            raise BadRequest(
                f"max_tokens: expected 1 to {room}, as the model has {longest} with the prompt's {len(tokens)}, "
                f"got {output}"
            )
        temperature, top_p, seed = body.get("temperature", 0.0), body.get("top_p", 1.0), body.get("seed")
        if not 0 <= temperature <= 2:
            raise BadRequest(f"temperature: expected 0 to 2, got {temperature}")
        if not 0 < top_p <= 1:
            raise BadRequest(f"top_p: expected above 0 and at most 1, got {top_p}")
        if seed is not None and seed not in SEEDS:
            raise BadRequest(f"seed: expected an integer of 64 bits, got {seed}")
        draw = torch.Generator()
        draw.seed() if seed is None else draw.manual_seed(seed)
        sampling = Sampling(float(temperature), float(top_p), draw)
        share = self._share(body.get("share"))
        dense, other = share == 1, None if share == self.served.shares[0] else share
        return Request(uuid4().hex, tokens, output, dense, self.served.stop, options=sampling, share=other)

    def _share(self, asked: int | float | str | None) -> Fraction:
        if asked is None:
            return self.served.shares[0]
        named = self.served.named_shares
        for text, share in named.items():
            if asked in (text, float(share)):
                return share
        raise BadRequest(f"share: expected one of {', '.join(named)}, got {asked!r}")

    # --- What it gets

    async def _unless_gone(self, http: HttpRequest, answer: Answer) -> Event | None:
        """The next event; None if the client went before, whose request is then cancelled."""
        following = asyncio.ensure_future(answer.next())
        try:
            while not (await asyncio.wait({following}, timeout=GONE))[0]:
                if await http.is_disconnected():
                    return None
            return following.result()
        finally:
            if not following.done() or following.cancelled():
                following.cancel()
                answer.close()

    async def _whole(self, http: HttpRequest, answer: Answer, event: Event | None, form: _Form) -> Response:
        decode, text, count = self.served.decoder(), "", 0
        while event is not None:
            count += event.token is not None
            text += self._text(decode, event)
            if event.finish == "error":
                return _error(500, "server_error", "expected finite logits, got others")
            if event.finish:
                return JSONResponse(form.whole(text, event.finish, count))
            try:
                event = await self._unless_gone(http, answer)
            except Refused as error:
                return _error(STATUS[error.reason], "overloaded_error", str(error))
        return Response(status_code=499)

    async def _stream(self, answer: Answer, event: Event, form: _Form, usage: bool) -> AsyncIterator[str]:
        decode, count = self.served.decoder(), 0
        try:
            while True:
                count += event.token is not None
                yield _line(form.part(self._text(decode, event), event.finish, first=count <= 1))
                if event.finish:
                    break
                event = await answer.next()
            if usage:
                yield _line(form.usage(count))
        except Refused as error:
            yield _line({"error": {"message": str(error), "type": "overloaded_error"}})
        yield "data: [DONE]\n\n"

    def _text(self, decode: Callable[[int], str | None], event: Event) -> str:
        if event.token is None or event.token in self.served.stop:
            return ""
        return decode(event.token) or ""


GONE = 0.5
"""Seconds after which it is looked whether a client that waits is still there."""


class _Stream(StreamingResponse):
    """Ends its request with the connection, even if the client went before the first byte."""

    def __init__(self, answer: Answer, lines: AsyncIterator[str]) -> None:
        super().__init__(lines, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


@dataclass(frozen=True)
class _Form:
    """The objects of the two endpoints. All parts of an answer have its id, and the first says who speaks."""

    chat: bool
    model: str
    prompt: int
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "chat.completion" if self.chat else "text_completion"
        kind = f"{name}.chunk" if self.chat and kind == "chunk" else name
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def whole(self, text: str, finish: str, tokens: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {**self._object("whole", [choice]), "usage": self._usage(tokens)}

    def part(self, text: str, finish: str | None, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        role = {"role": "assistant"} if first else {}
        choice |= {"delta": {**role, "content": text}} if self.chat else {"text": text}
        return self._object("chunk", [choice])

    def usage(self, tokens: int) -> dict[str, Any]:
        return {**self._object("chunk", []), "usage": self._usage(tokens)}

    def _usage(self, tokens: int) -> dict[str, int]:
        return {"prompt_tokens": self.prompt, "completion_tokens": tokens, "total_tokens": self.prompt + tokens}


def _is_text(found: Any) -> bool:
    """Not of half a surrogate pair, which JSON can have and UTF-8 cannot."""
    return isinstance(found, str) and not any("\ud800" <= c <= "\udfff" for c in found)


def _is_message(found: Any) -> bool:
    return isinstance(found, dict) and _is_text(found.get("role")) and _is_text(found.get("content"))


def _line(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _error(status: int, kind: str, message: str) -> Response:
    headers = {"Retry-After": RETRY_AFTER} if status in (429, 503) else None
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status, headers)
