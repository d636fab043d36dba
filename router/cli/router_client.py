"""The router's HTTP API, as commands use it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from router.cli.errors import CommandFailed

_TIMEOUT_S = 120.0
_RECORD_WAIT_S = 5.0
_RECORD_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """A chat answer as it came. Times are seconds since the request was sent."""

    text: str
    request_id: str
    token_times_s: tuple[float, ...]
    output_tokens: int

    @property
    def ttft_ms(self) -> float:
        """Milliseconds to the first piece of text."""
        return self.token_times_s[0] * 1e3

    @property
    def tokens_per_s(self) -> float:
        """Rate after the first token; 0 for a single one."""
        spent_s = self.token_times_s[-1] - self.token_times_s[0]
        return (self.output_tokens - 1) / spent_s if spent_s > 0 else 0.0


class RouterClient:
    """Talks to a running router; a context. Raises CommandFailed with the router's own words."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = url.rstrip("/")
        # No proxies from the environment: the router of this machine is not behind one.
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(
            base_url=self._url, timeout=_TIMEOUT_S, trust_env=False, headers=headers
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._http.close()

    def decision(self, request_id: str) -> dict[str, Any]:
        """Fetch a decision record."""
        try:
            response = self._http.get(f"/admin/requests/{request_id}")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise CommandFailed(f"{self._url}: {_message(response)}")
        record: dict[str, Any] = response.json()
        return record

    def finished_decision(self, request_id: str) -> dict[str, Any]:
        """Fetch the record of a request that ends about now, once it says how it ended."""
        deadline_s = time.monotonic() + _RECORD_WAIT_S
        while True:
            record = self.decision(request_id)
            finish = (record.get("actual") or {}).get("finish")
            if finish not in (None, "", "running") or time.monotonic() > deadline_s:
                return record
            threading.Event().wait(_RECORD_POLL_S)

    def ask(
        self, model: str, question: str, max_tokens: int, show: Callable[[str], None]
    ) -> StreamedAnswer:
        """Stream a chat answer; `show` gets each piece of text as it comes."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s = time.monotonic()
        pieces: list[str] = []
        times_s: list[float] = []
        tokens = 0
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise CommandFailed(f"{self._url}: {_message(response)}")
                for event in _events(response):
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    if text := _text(event):
                        times_s.append(time.monotonic() - started_s)
                        pieces.append(text)
                        show(text)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if not times_s:
            raise CommandFailed(f"{self._url}: the answer was empty; read the workers' logs")
        request_id = response.headers.get("x-request-id", "")
        return StreamedAnswer("".join(pieces), request_id, tuple(times_s), tokens or len(pieces))

    def _unreachable(self, error: httpx.HTTPError) -> CommandFailed:
        cause = str(error) or type(error).__name__
        return CommandFailed(
            f"router {self._url}: {cause}; start it with splitserve up, or name it with --url"
        )


def admin_key(variable: str | None) -> str | None:
    """Return the key held by an environment variable, None without a variable."""
    return os.environ.get(variable) if variable else None


def _events(response: httpx.Response) -> Any:
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise CommandFailed(f"the answer broke off: {event['error'].get('message')}")
        yield event


def _text(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def _message(response: httpx.Response) -> str:
    try:
        said = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = response.text[:200] or "no explanation"
    return f"status {response.status_code}: {said}"
