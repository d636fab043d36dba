"""The names that started engines have for their models, where the configuration has another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.sections import WorkerSpec
    from router.settings import RouterSettings

_ASK_S = 10.0


def with_engine_names(
    settings: RouterSettings,
    started: Collection[str],
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> RouterSettings:
    """Fill in `engine_model` of the workers named in `started` that serve one model only.

    Whoever writes `start: vllm serve org/Name` under `models.name` means that model, though vLLM
    calls it org/Name. Of a server that somebody else started this cannot be known.
    """

    def known(model: str, worker: WorkerSpec) -> WorkerSpec:
        if worker.name not in started or worker.engine_model is not None or worker.url is None:
            return worker
        own = only_model(worker.url, environ.get(worker.key_env or "", ""))
        if own in ("", model):
            return worker
        say(f"{worker.name} serves {own} as {model}")
        return worker.model_copy(update={"model": model, "engine_model": own})

    models = {
        name: spec.model_copy(update={"workers": tuple(known(name, each) for each in spec.workers)})
        for name, spec in settings.models.items()
    }
    return settings.model_copy(update={"models": models})


def only_model(url: str, key: str) -> str:
    """Return the name of a server's model; "" when it tells none, or several."""
    import httpx

    from router.backends.model_list import parse_models

    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(timeout=_ASK_S, trust_env=False, headers=headers) as client:
            cards = parse_models(client.get(f"{url}/v1/models").content)
    except (httpx.HTTPError, ValueError):
        return ""  # what is wrong shows when the router probes it
    return cards[0].name if len(cards) == 1 else ""
