"""The engine on its own thread, with a real decoder."""

import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from workers.native.engine.engine import Engine, Generation
from workers.native.engine.errors import EngineBusyError, EngineStoppedError, PromptTooLongError
from workers.native.engine.sequence import Failed, Output, Token
from workers.native.engine.settings import EngineSettings
from workers.native.handoff.errors import HandoffBroken
from workers.native.handoff.reference import HandoffReference
from workers.native.kv.layout import KvLayout
from workers.native.kv.pool import KvPool
from workers.native.models.decoder import Decoder
from workers.native.models.dense_kv import DenseKv
from workers.native.models.kv_session import KvSession
from workers.native.models.loading import load_decoder
from workers.native.sampling.params import SamplingParams
from workers.native.testing.driven_core import Letters, answer_alone
from workers.native.testing.history_model import HistoryModel
from workers.native.testing.tiny_model import write_tiny_folder
from workers.native.testing.waiting import thread_names, until

CPU = torch.device("cpu")
WAIT_S = 20.0


class Asked:
    """A request that was sent; `outputs` waits for its end."""

    def __init__(self, engine: Engine, prompt: list[int], params: SamplingParams,
                 *, choices: int = 1, source: HandoffReference | None = None) -> None:  # fmt: skip
        self.prompt, self.params, self.choices = prompt, params, choices
        self._queue: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self.wish = Generation(
            f"{id(self)}", prompt, params, self._queue.put, choices=choices, source=source
        )
        engine.generate(self.wish)

    def outputs(self) -> list[Output]:
        seen: list[Output] = []
        left = self.choices
        while left:
            output = self._queue.get(timeout=WAIT_S)
            seen.append(output)
            if isinstance(output, Failed):
                break
            left -= isinstance(output, Token) and output.finish is not None
        return seen

    def ids(self) -> list[list[int]]:
        tokens = [output for output in self.outputs() if isinstance(output, Token)]
        return [[t.token_id for t in tokens if t.index == i] for i in range(self.choices)]

    def failure(self) -> Exception:
        last = self.outputs()[-1]
        assert isinstance(last, Failed)
        assert self._queue.empty()
        return last.error


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(write_tiny_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(model: Decoder | HistoryModel, blocks: int, **bounds: int) -> Engine:
        if isinstance(model, Decoder):
            config = model.config
            layout = KvLayout(config.layers, config.kv_heads, config.head_dim, torch.float32, 4)
            eos, vocab_size = frozenset(config.eos_ids), config.vocab_size
        else:
            layout, eos, vocab_size = HistoryModel.layout(4), frozenset({0}), 12
        engine = Engine(
            model,
            KvPool(layout, blocks, CPU),
            EngineSettings(**bounds),
            eos=eos,
            model_hash="m",
            vocab_size=vocab_size,
            make_detokenizer=Letters,
        )
        engine.start()
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.stop()
        engine.pool.close()
    until(lambda: not thread_names("engine", "handoff"), "threads end")


def dense_logits(decoder: Decoder) -> Callable[[Sequence[int]], Tensor]:
    def logits_after(history: Sequence[int]) -> Tensor:
        kv = DenseKv(decoder.config, len(history))
        tokens, rows = torch.tensor(history), torch.tensor([len(history) - 1])
        return decoder.forward(tokens, torch.arange(len(history)), kv, rows)[0]

    return logits_after


@pytest.mark.parametrize("step_tokens", [5, 64])
def test_a_real_decoder_under_pressure(
    decoder: Decoder, make_engine: Callable[..., Engine], step_tokens: int
) -> None:
    engine = make_engine(decoder, 34, step_tokens=step_tokens, max_running=6)
    draw = random.Random(step_tokens)
    shared = draw.choices(range(256), k=21)
    asked = []
    for number, length in enumerate((1, 3, 4, 16, 17, 30, 41, 8, 2, 5, 12, 33)):
        prompt = [*shared, *draw.choices(range(256), k=40)][:length] if number % 2 else (
            draw.choices(range(256), k=length))  # fmt: skip
        params = SamplingParams(
            temperature=(0.0, 0.8)[number % 2], seed=number, max_tokens=10 + number % 4, top_p=0.95
        )
        asked.append(Asked(engine, prompt, params, choices=1 + 2 * (number % 3 == 0)))
    logits_after = dense_logits(decoder)
    eos = frozenset(decoder.config.eos_ids)
    for each in asked:
        for fork, ids in enumerate(each.ids()):
            alone = answer_alone(logits_after, each.prompt, each.params, fork=fork, eos=eos)
            assert ids == alone.ids
    until(lambda: engine.stats().kv_used_tokens == 0, "all blocks are free")
    stats = engine.stats()
    assert stats.failures == 0
    assert stats.preemptions > 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    "host,port",
    [("127.0.0.1", None), ("127.0.0.1", 99999), ("127.0.0.1", -1), ("\0", 80), ("a" * 99, 80)],
)
def test_a_pull_that_cannot_even_connect(
    make_engine: Callable[..., Engine], host: str, port: int | None
) -> None:
    engine = make_engine(HistoryModel(12), 8)
    for _ in range(10):  # it may fail before the engine's thread has seen the request
        reference = HandoffReference("id", "key", host, free_port() if port is None else port)
        error = Asked(engine, [1, 2], SamplingParams(), choices=2, source=reference).failure()
        assert isinstance(error, HandoffBroken)
        assert "cannot reach the prefill worker" in str(error)
    until(lambda: engine.stats().kv_used_tokens == 0, "all blocks are free")
    assert engine.stats().pull_failures == 10


def test_a_failed_step_is_told_and_the_engine_goes_on(make_engine: Callable[..., Engine]) -> None:
    model = HistoryModel(12)
    engine = make_engine(model, 8)
    model.fail_next = True
    error = Asked(engine, [1, 2], SamplingParams()).failure()
    assert isinstance(error, EngineStoppedError)
    assert "told to fail" in str(error)
    assert engine.alive
    assert engine.stats().failures == 1
    params = SamplingParams(max_tokens=4)
    assert Asked(engine, [1, 2], params).ids() == [
        answer_alone(model.logits_after, [1, 2], params).ids
    ]


class GatedModel(HistoryModel):
    """Every step waits for `gate`; `reached` tells that one does."""

    def __init__(self) -> None:
        super().__init__(12)
        self.reached, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def shut(self) -> None:
        """From now on."""
        self.reached.clear()
        self.gate.clear()

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: KvSession, logit_rows: Tensor
    ) -> Tensor:
        self.reached.set()
        assert self.gate.wait(WAIT_S)
        return super().forward(tokens, positions, kv, logit_rows)


def test_a_full_queue_refuses_and_a_stop_ends_everything(
    make_engine: Callable[..., Engine],
) -> None:
    model = GatedModel()
    engine = make_engine(model, 8, max_waiting=2)
    model.shut()
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    asked = [Asked(engine, [1], params)]
    assert model.reached.wait(WAIT_S)
    asked += [Asked(engine, [number], params) for number in (2, 3)]
    with pytest.raises(EngineBusyError, match="2 requests wait already"):
        Asked(engine, [4], params)
    with pytest.raises(EngineBusyError):
        engine.offer(asked[0].wish)
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    until(lambda: not engine.alive, "the engine takes no more")
    with pytest.raises(EngineStoppedError, match="shutting down"):
        Asked(engine, [5], params)
    model.gate.set()
    stopper.join(WAIT_S)
    for each in asked:
        assert isinstance(each.failure(), EngineStoppedError)


def test_an_aborted_request_is_silent(make_engine: Callable[..., Engine]) -> None:
    model = GatedModel()
    engine = make_engine(model, 8)
    model.shut()
    asked = Asked(engine, [1], SamplingParams(max_tokens=9, ignore_eos=True))
    assert model.reached.wait(WAIT_S)
    engine.abort(asked.wish.request_id)
    model.gate.set()
    assert Asked(engine, [2], SamplingParams(max_tokens=2, ignore_eos=True)).ids()
    until(lambda: engine.stats().kv_used_tokens == 0, "all blocks are free")
    assert engine.stats().finished == {"abort": 1, "length": 1}


def test_sizes_are_checked_against_context_and_cache(
    decoder: Decoder, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(decoder, 10, max_context_tokens=30)
    assert engine.check_size(10, 5) == 5
    assert engine.check_size(10, None) == 20
    assert engine.check_size(29, 1) == 1
    assert engine.check_size(10, 0) == 0
    for prompt_tokens, max_tokens in ((30, None), (30, 0), (10, 21), (99, 1), (10, 10**30)):
        with pytest.raises(PromptTooLongError, match="maximum context length is 30 tokens"):
            engine.check_size(prompt_tokens, max_tokens)
    assert make_engine(decoder, 5, max_context_tokens=999).check_size(1, None) == 19
    assert make_engine(decoder, 5).check_size(1, None) == 19
