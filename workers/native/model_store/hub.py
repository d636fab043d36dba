"""Fetches a model from the Hugging Face hub, and says quickly when that cannot be done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from workers.native.model_store.errors import HubUnavailableError
from workers.native.model_store.folder import missing_file

WANTED_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "LICENSE*",
)
_HTTP_TIMEOUT_S = 3.0
# Name resolution has no timeout of its own and may take half a minute without a network.
_PROBE_DEADLINE_S = 6.0


class Hub(Protocol):
    """A source of complete model folders by `organisation/name`."""

    def cached(self, hub_id: str) -> Path | None:
        """A complete folder that earlier downloads left on this machine, or None. No network."""

    def download(self, hub_id: str, target: Path) -> None:
        """Fetch the model into `target`. Raises HubUnavailableError."""


class HuggingFaceHub:
    """The real hub. Honours HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN."""

    def __init__(
        self, endpoint: str | None = None, *, probe_deadline_s: float = _PROBE_DEADLINE_S
    ) -> None:
        """`endpoint` is another hub's URL; None takes HF_ENDPOINT or the public hub."""
        self._endpoint = endpoint
        self._probe_deadline_s = probe_deadline_s

    def cached(self, hub_id: str) -> Path | None:
        """See Hub."""
        try:
            folder = Path(snapshot_download(hub_id, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, OSError):
            return None
        return folder if missing_file(folder) is None else None

    def download(self, hub_id: str, target: Path) -> None:
        """See Hub. A first short request finds out within seconds whether the hub answers."""
        if constants.HF_HUB_OFFLINE:
            raise HubUnavailableError(f"{hub_id}: HF_HUB_OFFLINE is set; unset it to download")
        _translated(hub_id, lambda: self._probe(hub_id))
        _translated(
            hub_id,
            lambda: snapshot_download(
                hub_id,
                local_dir=target,
                allow_patterns=list(WANTED_FILES),
                etag_timeout=_HTTP_TIMEOUT_S,
                endpoint=self._endpoint,
            ),
        )

    def _probe(self, hub_id: str) -> None:
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                HfApi(self._endpoint).model_info(hub_id, timeout=_HTTP_TIMEOUT_S)
            except Exception as error:  # task boundary of the thread: raised again below
                failures.append(error)

        thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
        thread.start()
        thread.join(self._probe_deadline_s)
        if thread.is_alive():
            raise TimeoutError(f"no answer within {self._probe_deadline_s:g} s")
        if failures:
            raise failures[0]


def _translated(hub_id: str, call: Callable[[], object]) -> None:
    try:
        call()
    except GatedRepoError as error:
        raise HubUnavailableError(
            f"{hub_id} is gated on the hub; accept its licence there and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise HubUnavailableError(
            f"the hub has no public model {hub_id}; check the name or set HF_TOKEN"
        ) from error
    except Exception as error:
        # The client library changed its HTTP package, and so its network errors, twice.
        reason = (str(error).splitlines() or [""])[0]
        raise HubUnavailableError(
            f"{hub_id}: the model hub did not answer ({type(error).__name__}: {reason}); "
            "check the network or name a local folder"
        ) from error
