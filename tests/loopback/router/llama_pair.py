"""Two llama-servers and their couriers behind a router: fake servers, real couriers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.testing.fake_llama import FakeLlama
from router.testing.llama_slot import tokens_of
from router.testing.loopback_router import LoopbackRouter
from workers.courier.testing.served_courier import ServedCourier

CHAT = "/v1/chat/completions"
WORDS = "how long is the river that runs below the old stone bridge in the north"
BODY = {"model": "m", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 3}
STREAM = {**BODY, "stream": True}
PROMPT = {"model": "m", "prompt": WORDS, "max_tokens": 3}
PROMPT_TOKENS = len(tokens_of(f"< user > {WORDS} < assistant >"))


@dataclass(frozen=True, slots=True)
class LlamaSplit:
    """A router before two llama-servers, `p` and `d`, each with its courier."""

    router: LoopbackRouter
    p: FakeLlama
    d: FakeLlama
    p_courier: ServedCourier
    d_courier: ServedCourier

    async def ask(self, body: object, route: str = CHAT, **headers: str) -> Any:
        answer = await self.router.client.post(
            route, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        assert answer.status_code == 200, answer.text
        return answer

    async def record(self, answer: Any) -> dict[str, Any]:
        return await self.router.record(answer)

    async def clean(self) -> None:
        """Nothing is left: no request, no slot in use, no file, and no answer was wrong."""
        await self.router.idle()
        for fake in (self.p, self.d):
            await fake.until(lambda _, fake=fake: fake.busy == 0)  # type: ignore[misc]
            assert not fake.aborted
            assert fake.wrong_answers == 0
            assert fake.not_owned == 0
        for courier in (self.p_courier, self.d_courier):
            await self.router.until(lambda c=courier: c.files() == [])  # type: ignore[misc]


@contextlib.asynccontextmanager
async def llama_split(
    folder: Path, *, shared: bool = False, **settings: Any
) -> AsyncIterator[LlamaSplit]:
    places = [folder / "both", folder / "both"] if shared else [folder / "p", folder / "d"]
    async with FakeLlama(folder=places[0]) as p, FakeLlama(folder=places[1]) as d:
        with ServedCourier(places[0], key="pk") as pc, ServedCourier(places[1], key="dk") as dc:
            workers = (
                worker("p", "prefill", p, pc, courier_key_env="PK"),
                worker("d", "decode", d, dc, courier_key_env="DK"),
            )
            environ = {"PK": "pk", "DK": "dk"}
            async with LoopbackRouter(*workers, environ=environ, **settings) as router:
                yield LlamaSplit(router, p, d, pc, dc)


def worker(
    name: str, role: str, fake: FakeLlama, courier: ServedCourier | None = None, **more: str
) -> dict[str, str]:
    entry = {"url": fake.url, "name": name, "role": role, **more}
    return entry if courier is None else {**entry, "courier": courier.url}
