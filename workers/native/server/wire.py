"""HTTP between this worker and a router, beside the OpenAI routes. JSON, documented in
docs/NATIVE_PROTOCOL.md.

`GET  /splitserve/profile`             what this worker is
`GET  /splitserve/load`                what it holds now
`POST /splitserve/prefill/v1/...`      a client's body; answers two lines of JSON, the first at once
`POST /splitserve/release/{offer_id}`  end an offer nobody will read
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from workers.native.engine.engine import Generation
from workers.native.engine.sequence import Failed, Output, PromptReport
from workers.native.handoff.offers import Offer
from workers.native.handoff.reference import HandoffReference
from workers.native.server.errors import classify
from workers.native.server.generation import OutputStream
from workers.native.server.replies import event
from workers.native.server.service import Service


def profile(service: Service) -> dict[str, Any]:
    """Return what a router needs to know once."""
    engine = service.engine
    stats = engine.stats()
    return {
        "engine": "native",
        "version": service.version,
        "instance": service.instance,
        "role": service.role,
        "models": [service.model_name],
        "connector": "native",
        "pairing_key": engine.pairing_key,
        "max_running": engine.settings.max_running,
        "step_tokens": engine.settings.step_tokens,
        "max_context_tokens": engine.settings.max_context_tokens,
        "kv_capacity_tokens": stats.kv_capacity_tokens,
        "kv_bytes_per_token": engine.pool.layout.token_bytes,
        "prefill_tok_s": stats.prefill_tok_s,
        "decode_tok_s": stats.decode_tok_s,
    }


def load(service: Service) -> dict[str, Any]:
    """Return gauges of now."""
    stats = service.engine.stats()
    return {
        "instance": service.instance,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_used_tokens": stats.kv_used_tokens,
        "kv_capacity_tokens": stats.kv_capacity_tokens,
        "offers": service.engine.offers.live,
        "prefill_tok_s": stats.prefill_tok_s,
        "decode_tok_s": stats.decode_tok_s,
    }


def report_headers(reports: list[PromptReport]) -> dict[str, str]:
    """Return headers that tell a router how the prompt became ready."""
    if not reports:
        return {}
    first = reports[0]
    headers = {
        "x-splitserve-prefill-ms": f"{first.prefill_s * 1e3:.2f}",
        "x-splitserve-queue-ms": f"{first.queued_s * 1e3:.2f}",
        "x-splitserve-cached-tokens": str(first.cached_tokens),
    }
    if first.pulled is not None:
        headers["x-splitserve-transfer-ms"] = f"{first.pulled.transfer_s * 1e3:.3f}"
        headers["x-splitserve-transfer-bytes"] = str(first.pulled.moved_bytes)
        headers["x-splitserve-transfer-path"] = "shared" if first.pulled.shared else "tcp"
    return headers


def error_event(error: Exception) -> bytes:
    """Return the event that ends a stream that broke."""
    return event(classify(error).envelope())


class PrefillReply:
    """Answers a prefill call: a line with the offer at once, a line when prefill is done.

    Leaving before the second line aborts the prefill: a router that went away wants no KV.
    """

    def __init__(self, service: Service, wish: Generation, stream: OutputStream, host: str) -> None:
        self._service = service
        self._wish = wish
        self._stream = stream
        self._host = host
        self._offer_id = ""
        self._done = False

    def open(self) -> Offer:
        """Queue the prefill. Raises EngineError when the engine refuses."""
        offer = self._service.engine.offer(self._wish)
        self._offer_id = offer.offer_id
        return offer

    async def lines(self, offer: Offer) -> AsyncIterator[bytes]:
        """Yield the two lines."""
        reference = HandoffReference(
            offer.offer_id, offer.key, self._host, self._service.handoff_port
        )
        first = {
            "handoff_id": offer.offer_id,
            "attributes": reference.encode(),
            "prompt_tokens": offer.prompt_tokens,
        }
        yield json.dumps(first).encode() + b"\n"
        second = self._last_line(await self._stream.next_output())
        self._done = True
        yield json.dumps(second).encode() + b"\n"

    def abandon(self) -> None:
        """The router has left: stop the prefill, or drop its KV, unless it was told of it."""
        if not self._done:
            self._service.engine.abort(self._wish.request_id)
            self._service.engine.offers.release(self._offer_id)

    @staticmethod
    def _last_line(output: Output) -> dict[str, Any]:
        if isinstance(output, PromptReport):
            return {
                "prompt_tokens": output.prompt_tokens,
                "cached_tokens": output.cached_tokens,
                "prefill_ms": output.prefill_s * 1e3,
                "queue_ms": output.queued_s * 1e3,
            }
        assert isinstance(output, Failed), f"unexpected {output!r} from a prefill"
        return classify(output.error).envelope()
