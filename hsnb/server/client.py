"""A small client of SGLang's HTTP interface: generate, server_info, model_info, flush_cache; blocking and async."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import stamina

from hsnb.errors import HsnbError, ServerError

# Only these happen before a byte of an answer came, so asking again cannot run a request twice.
_RETRIED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True)
class Generated:
    """What the server answered to one request."""

    rid: str
    text: str
    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    input_logprobs: list[float | None] = field(default_factory=list)  # [prompt_tokens], the first None; empty unless asked for
    input_ids: list[int] = field(default_factory=list)  # as the server echoes them with the logprobs
    output_logprobs: list[float] = field(default_factory=list)
    raw: dict = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, tree: dict) -> Generated:
        """Read one element of /generate's answer (fields read in SGLang 0.5.17 to 0.5.23)."""
        meta = tree.get("meta_info", {})
        given = meta.get("input_token_logprobs") or []  # rows (logprob, token id, text)
        made = meta.get("output_token_logprobs") or []
        return cls(
            rid=str(meta.get("id", "")),
            text=tree.get("text") or "",
            output_ids=list(tree.get("output_ids") or [row[1] for row in made]),
            prompt_tokens=int(meta.get("prompt_tokens", 0)),
            cached_tokens=int(meta.get("cached_tokens", 0)),
            input_logprobs=[row[0] for row in given],
            input_ids=[row[1] for row in given],
            output_logprobs=[row[0] for row in made],
            raw=tree,
        )


class Client:
    """Talk to the server at `url`. Use it as a (sync or async) context manager, or close it.

    `timeout_s` is for one answer; a long prefill on a CPU takes minutes. Connections are tried again for a few seconds;
    a request that may have reached the server is never sent twice. Raises ServerError with the server's own message.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0, connections: int = 64):
        self.url = url.rstrip("/")
        # trust_env off: a proxy set for the network at large must not be asked for 127.0.0.1.
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "timeout": httpx.Timeout(timeout_s, connect=5.0),
            "limits": httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            "trust_env": False,
        }
        self._sync: httpx.Client | None = None
        self._async: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_) -> None:
        await self.aclose()

    def close(self) -> None:
        """Close the blocking connections."""
        if self._sync:
            self._sync.close()
            self._sync = None

    async def aclose(self) -> None:
        """Close all connections, from within the loop that used them."""
        if self._async:
            await self._async.aclose()
            self._async = None
        self.close()

    def request(self, method: str, path: str, json: dict | None = None) -> Any:
        """Send one request and return the decoded answer (JSON, else text)."""
        self._sync = self._sync or httpx.Client(**self._options)
        try:
            for attempt in stamina.retry_context(on=_RETRIED, attempts=4, timeout=10.0, wait_initial=0.1, wait_max=2.0):
                with attempt:
                    return self._read(self._sync.request(method, path, json=json), path)
        except httpx.HTTPError as error:
            raise self._broken(path, error) from error

    async def arequest(self, method: str, path: str, json: dict | None = None) -> Any:
        """Send one request without blocking the loop and return the decoded answer."""
        if self._async is None or self._loop is not asyncio.get_running_loop():  # connections belong to the loop that made them
            self._async, self._loop = httpx.AsyncClient(**self._options), asyncio.get_running_loop()
        try:
            async for attempt in stamina.retry_context(on=_RETRIED, attempts=4, timeout=10.0, wait_initial=0.1, wait_max=2.0):
                with attempt:
                    return self._read(await self._async.request(method, path, json=json), path)
        except httpx.HTTPError as error:
            raise self._broken(path, error) from error

    def generate(self, input_ids: Sequence[int] | None = None, **options: Any) -> Generated:
        """Run one request through the model; see `generate_body` for the options."""
        return Generated.of(self.request("POST", "/generate", generate_body(input_ids, **options)))

    async def agenerate(self, input_ids: Sequence[int] | None = None, **options: Any) -> Generated:
        """Run one request through the model without blocking; several may be in flight on one client."""
        return Generated.of(await self.arequest("POST", "/generate", generate_body(input_ids, **options)))

    def server_info(self) -> dict:
        """Return SGLang's own account of its settings (some 500 keys)."""
        return self._first_of("/server_info", "/get_server_info")

    def model_info(self) -> dict:
        """Return the model's path, architectures and kind; costs no token."""
        return self._first_of("/model_info", "/get_model_info")

    def flush_cache(self) -> None:
        """Empty the server's caches; refused by the server while requests run."""
        self.request("POST", "/flush_cache")

    def _first_of(self, *paths: str) -> dict:
        for path in paths[:-1]:
            try:
                return self.request("GET", path)
            except ServerError as error:
                if getattr(error, "status", None) != 404:
                    raise
        return self.request("GET", paths[-1])

    def _read(self, response: httpx.Response, path: str) -> Any:
        if response.is_success:
            try:
                return response.json()
            except ValueError:
                return response.text
        message = _message(response)
        refused = response.status_code == 400
        error = ServerError(
            got=f"{self.url}{path} answered {response.status_code}: {message}",
            expected="an answer",
            likely="the request does not fit this server (too long, or a token id outside the vocabulary)"
            if refused
            else "see the server's log",
            next="mend the request" if refused else "read the server's log",
        )
        error.status = response.status_code
        raise error

    def _broken(self, path: str, error: httpx.HTTPError) -> HsnbError:
        slow = isinstance(error, httpx.ReadTimeout)
        return ServerError(
            got=f"{self.url}{path}: {type(error).__name__} {error}".rstrip(),
            expected="an answer" if slow else "a server that listens there",
            likely="the server hangs, or is slower than the client's patience" if slow else "the server has ended, or listens elsewhere",
            next="read the server's log",
        )


def generate_body(
    input_ids: Sequence[int] | None = None,
    *,
    rid: str,
    max_new_tokens: int = 1,
    logprobs: bool = False,
    text: str | None = None,
    temperature: float = 0.0,
) -> dict:
    """Return the body of /generate for token ids or `text` (one of the two).

    `logprobs` asks for the prompt's logprobs as well, which makes a prefill 1.7 times slower on a CPU.
    """
    if (input_ids is None) == (text is None):
        raise ServerError(
            got="both input_ids and text" if text is not None else "neither input_ids nor text",
            expected="one of the two",
            likely="a slip in the call",
            next="give input_ids=[...] or text='...'",
        )
    body: dict[str, Any] = {"rid": rid, "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": temperature}}
    body |= {"text": text} if input_ids is None else {"input_ids": [int(i) for i in input_ids]}
    if logprobs:
        body |= {"return_logprob": True, "logprob_start_len": 0}
    return body


def _message(response: httpx.Response) -> str:
    try:
        tree = response.json()
    except ValueError:
        if "<html" in response.text[:500].lower():
            return "an HTML page: no SGLang server listens there"
        return response.text[:500] or response.reason_phrase
    error = tree.get("error", tree) if isinstance(tree, dict) else tree
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
