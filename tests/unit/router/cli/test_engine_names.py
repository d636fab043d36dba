"""Names that started engines have for their models."""

import pytest

from router.cli import engine_names
from router.cli.engine_names import with_engine_names
from router.settings import RouterSettings, build

OWN = {
    "http://vllm:1": "org/Llama",
    "http://same:1": "llama",
    "http://many:1": "",
    "http://foreign:1": "org/Other",
}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> RouterSettings:
    monkeypatch.setattr(engine_names, "only_model", lambda url, key: OWN[url] + key)
    workers = [{"url": url, "name": url.split("/")[2].split(":")[0]} for url in OWN]
    named = {"url": "http://told:1", "name": "told", "model": "llama", "engine_model": "x"}
    return build({"models": {"llama": {"workers": [*workers, named]}}, "workers": [{"url": "b:1"}]})


def test_only_started_workers_with_one_model_of_another_name_are_told(
    settings: RouterSettings,
) -> None:
    said: list[str] = []
    started = ["vllm", "same", "many", "told"]
    after = with_engine_names(settings, started, {}, said.append)
    assert {spec.name: spec.engine_model for spec in after.worker_specs} == {
        "vllm": "org/Llama",
        "same": None,
        "many": None,
        "foreign": None,
        "told": "x",
        None: None,
    }
    assert said == ["vllm serves org/Llama as llama"]
    assert build(after.model_dump(exclude_none=True)) == after


def test_the_key_of_the_worker_is_used(settings: RouterSettings) -> None:
    (worker, *_) = settings.models["llama"].workers
    keyed = worker.model_copy(update={"key_env": "K"})
    one = settings.models["llama"].model_copy(update={"workers": (keyed,)})
    settings = settings.model_copy(update={"models": {"llama": one}})
    after = with_engine_names(settings, ["vllm"], {"K": "-key"}, lambda line: None)
    assert after.worker_specs[0].engine_model == "org/Llama-key"
