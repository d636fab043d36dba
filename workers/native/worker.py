"""Composition root of a native worker: model, pool, engine, hand-off port, HTTP."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn

from workers.native.engine.engine import Engine
from workers.native.engine.settings import EngineSettings
from workers.native.handoff.server import HandoffServer
from workers.native.kv.layout import KvLayout
from workers.native.kv.pool import KvPool
from workers.native.models.decoder import Decoder
from workers.native.models.detokenizer import IncrementalDetokenizer
from workers.native.models.loading import load_decoder
from workers.native.models.tokenizer import Tokenizer
from workers.native.server.app import create_app
from workers.native.server.service import Service
from workers.settings import WorkerSettings

log = logging.getLogger("splitserve.worker")

_SWITCH_INTERVAL_S = 0.0005  # let a hand-off thread in quickly while the engine thread runs
_DRAIN_S = 5


@dataclass(frozen=True, slots=True)
class Worker:
    """A loaded worker, not yet listening for HTTP."""

    service: Service
    engine: Engine
    handoffs: HandoffServer

    def start(self) -> None:
        """Start the engine's thread and the hand-off port."""
        self.engine.start()
        self.handoffs.start()

    def stop(self) -> None:
        """End hand-offs, then requests, then give the KV memory back."""
        self.handoffs.stop()
        self.engine.stop()
        self.engine.pool.close()


def build(settings: WorkerSettings, folder: Path, model_hash: str) -> Worker:
    """Load the model in `folder` and put a worker around it."""
    device = torch.device(settings.device)
    dtype = _dtype(settings.dtype, device)
    model = load_decoder(folder, dtype=dtype, device=device)
    tokenizer = Tokenizer.from_folder(folder)
    config = model.config
    layout = KvLayout(config.layers, config.kv_heads, config.head_dim, dtype)
    pool = KvPool(layout, layout.blocks_for(settings.kv_tokens), device, model.cpu_kernel)
    engine = Engine(
        model,
        pool,
        _engine_settings(settings, model),
        eos=frozenset(config.eos_ids),
        model_hash=model_hash,
        vocab_size=config.vocab_size,
        make_detokenizer=lambda: IncrementalDetokenizer(tokenizer, at_text_start=False),
        allow_shared_memory=settings.shared_memory,
    )
    handoffs = HandoffServer(engine.offers, pool, engine.pairing_key, settings.host)
    service = Service(
        engine=engine,
        tokenizer=tokenizer,
        model_name=settings.served_name or settings.model,
        model_hash=model_hash,
        vocab_size=config.vocab_size,
        role=settings.role,
        handoff_port=handoffs.port,
        started_s=time.time(),
        version=importlib.metadata.version("splitserve"),
        instance=uuid.uuid4().hex,
    )
    return Worker(service, engine, handoffs)


def serve(settings: WorkerSettings, folder: Path, model_hash: str) -> int:
    """Run a worker until SIGTERM or SIGINT. Returns the exit status."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    worker = build(settings, folder, model_hash)
    worker.start()
    config = uvicorn.Config(
        create_app(worker.service),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_DRAIN_S,
        timeout_keep_alive=75,
    )
    server = uvicorn.Server(config)
    try:
        server.run()
    finally:
        worker.stop()
    return 0 if server.started else 1


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _engine_settings(settings: WorkerSettings, model: Decoder) -> EngineSettings:
    longest = model.config.max_context_tokens
    wanted = settings.max_context_tokens or longest
    return EngineSettings(
        max_running=settings.max_running,
        step_tokens=settings.step_tokens,
        kv_tokens=settings.kv_tokens,
        max_context_tokens=min(wanted, longest),
        lease_s=settings.lease_s,
    )
