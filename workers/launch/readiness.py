"""Whether an engine that was started takes requests yet."""

from __future__ import annotations

import http.client

_PROBE_S = 1.0
_UP = (200, 401, 403)  # the last two: it is there and asks for its key
_NO_SUCH_ROUTE = (404, 405, 501)


def answers(host: str, port: int) -> bool:
    """Ask `GET /health`, and `GET /v1/models` where there is no such route (Ollama, LM Studio).

    `/health` goes first: vLLM, SGLang and llama.cpp answer it with 503 while they load, when
    llama.cpp lists its model already. Takes two seconds at most, mostly a millisecond.
    """
    status = _status(host, port, "/health")
    if status in _NO_SUCH_ROUTE:
        status = _status(host, port, "/v1/models")
    return status in _UP


def _status(host: str, port: int, path: str) -> int | None:
    connection = http.client.HTTPConnection(host, port, timeout=_PROBE_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
