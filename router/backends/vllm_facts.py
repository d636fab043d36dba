"""What a vLLM server tells of itself: `GET /version`, `/v1/models` and `/metrics`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from router.backends.probing import get_json
from router.backends.prometheus_text import Series, read_series
from router.origin import Origin
from router.upstream import Upstream
from router.wire import Headers

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
READ_TOO_LATE = "vllm:nixl_num_notifications_after_expiry_total"
_CACHE = "vllm:cache_config_info"
_STARTED = "process_start_time_seconds"
_NAMES = (RUNNING, WAITING, KV_USAGE, BY_SOURCE, EXPIRED, READ_TOO_LATE, _CACHE, _STARTED)
_PREFIX = b"\nvllm:"
_TAKES_PRIORITY = (0, 10)  # before it, anything but 0 was an error without priority scheduling
_SHOWS_NIXL = (0, 32)  # the first that was seen to show NIXL's counters from its start on


class _Version(msgspec.Struct):
    version: str


class _Card(msgspec.Struct):
    id: str
    owned_by: str = ""
    root: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """One server. Sizes are 0 where it does not tell, as with --disable-log-stats."""

    version: str
    models: tuple[str, ...]
    root: str = ""
    context_tokens: int = 0
    kv_capacity_tokens: int = 0
    kv_bytes_per_token: int = 0
    kv_cache_dtype: str = ""
    block_tokens: int = 0
    started_s: float = 0.0
    has_nixl: bool = False

    @property
    def takes_priority(self) -> bool:
        """Whether a priority is taken, or at least ignored, however it schedules."""
        return self._is_at_least(_TAKES_PRIORITY)

    @property
    def lacks_nixl(self) -> bool:
        """Whether it is certain that it runs without a NIXL connector."""
        known = self.started_s > 0 and self._is_at_least(_SHOWS_NIXL)
        return known and not self.has_nixl

    def _is_at_least(self, version: tuple[int, int]) -> bool:
        numbers = re.match(r"(\d+)\.(\d+)", self.version)
        return numbers is not None and (int(numbers[1]), int(numbers[2])) >= version


async def read_facts(upstream: Upstream, origin: Origin, headers: Headers) -> VllmFacts:
    """Ask a server. Raises ValueError when it is not vLLM, and UpstreamError."""
    status, body = await get_json(upstream, origin, b"/version", headers)
    if status != 200:
        raise ValueError(f"GET /version answered {status}")
    try:
        version = msgspec.json.decode(body, type=_Version).version
    except msgspec.DecodeError as error:
        raise ValueError(f"GET /version: {error}") from error
    status, body = await get_json(upstream, origin, b"/v1/models", headers)
    if status != 200:
        raise ValueError(f"GET /v1/models answered {status}")
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except msgspec.DecodeError as error:
        raise ValueError(f"GET /v1/models: {error}") from error
    series = await read_metrics(upstream, origin, headers)
    if series is None and not any(card.owned_by == "vllm" for card in cards):
        raise ValueError("it has neither vLLM's metrics nor its model list")
    return _facts(version, cards, series or Series(()))


async def read_metrics(upstream: Upstream, origin: Origin, headers: Headers) -> Series | None:
    """Read the series that are used here; None where the server keeps none.

    Raises ValueError for what is no metrics text, and UpstreamError.
    """
    status, text = await get_json(upstream, origin, b"/metrics", headers)
    if status != 200 or _PREFIX not in b"\n" + text:
        return None
    return read_series(text, _NAMES)


def started_s(series: Series) -> float:
    """When the server process started, by its own clock; 0 where several share the metrics."""
    return series.total(_STARTED)


def _facts(version: str, cards: list[_Card], series: Series) -> VllmFacts:
    caches = [sample.labels for sample in series.of(_CACHE)]  # one of each data-parallel engine
    capacity = sum(_capacity_tokens(each) for each in caches)
    bytes_ = sum(_number(each, "kv_cache_memory_bytes") for each in caches)
    first: Mapping[str, str] = caches[0] if caches else {}
    return VllmFacts(
        version=version,
        models=tuple(card.id for card in cards),
        root=next((card.root for card in cards if card.root), ""),
        context_tokens=max((card.max_model_len or 0 for card in cards), default=0),
        kv_capacity_tokens=capacity,
        kv_bytes_per_token=bytes_ // capacity if capacity else 0,
        kv_cache_dtype=first.get("cache_dtype", ""),
        block_tokens=_number(first, "block_size"),
        started_s=started_s(series),
        has_nixl=bool(series.of(EXPIRED)),
    )


def _capacity_tokens(labels: Mapping[str, str]) -> int:
    told = _number(labels, "kv_cache_size_tokens")
    return told or _number(labels, "block_size") * _number(labels, "num_gpu_blocks")


def _number(labels: Mapping[str, str], name: str) -> int:
    """Read a label that holds a whole number; 0 for None and for what is none."""
    text = labels.get(name, "")
    return int(text) if text.isdecimal() else 0
