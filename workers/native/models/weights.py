"""Named weights of a model, from safetensors files, and the fused layout the Decoder wants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.native.models.config import ModelConfig
from workers.native.models.errors import InvalidModelError
from workers.native.models.hf_config import read_json


class WeightSource(Protocol):
    """Weights by their Hugging Face name (`model.layers.0.self_attn.q_proj.weight`)."""

    def names(self) -> Iterable[str]:
        """All names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The named weight's shape, without reading it. Raises InvalidModelError if absent."""

    def tensor(self, name: str) -> Tensor:
        """The named weight on the CPU, in the stored dtype. Raises InvalidModelError if absent."""


def safetensors_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder in a fixed order (the index decides when sharded).

    Raises InvalidModelError when there is none or one that the index lists is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, Mapping) or not shards:
            raise InvalidModelError(f"{index} has no weight_map; pull the model again")
        files = [folder / name for name in sorted({str(value) for value in shards.values()})]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidModelError(f"{folder} holds no *.safetensors weights; pull the model again")
    for file in files:
        if not file.is_file():
            raise InvalidModelError(f"{file} is listed in {index.name} but missing; pull it again")
    return files


class SafetensorsWeights:
    """Weights of one or several safetensors files, memory-mapped. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        for file in safetensors_files(folder):
            try:
                opened = self._stack.enter_context(safe_open(str(file), framework="pt"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise InvalidModelError(
                    f"{file} is not a readable safetensors file ({error}); pull the model again"
                ) from error
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                self._file_of[_plain_name(name)] = (opened, name)

    def names(self) -> Iterable[str]:
        """All names, without a `language_model.` prefix."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The named weight's shape. Raises InvalidModelError if absent."""
        opened, stored_name = self._find(name)
        return tuple(opened.get_slice(stored_name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """The named weight. Raises InvalidModelError if absent."""
        opened, stored_name = self._find(name)
        tensor: Tensor = opened.get_tensor(stored_name)
        return tensor

    def _find(self, name: str) -> tuple[Any, str]:
        if name not in self._file_of:
            raise InvalidModelError(
                f"weight {name!r} is missing in {self._folder}: config.json and weights do not "
                "belong together; pull the model again"
            )
        found: tuple[Any, str] = self._file_of[name]
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def _plain_name(name: str) -> str:
    for prefix in ("language_model.", "model.language_model."):
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            return rest if prefix == "language_model." else f"model.{rest}"
    return name


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight the model must have, by Hugging Face name, with its shape."""
    hidden, dim = config.hidden, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        matrices = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (config.intermediate, hidden),
            "mlp.up_proj": (config.intermediate, hidden),
            "mlp.down_proj": (hidden, config.intermediate),
        }
        for name, shape in matrices.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if has_bias(config, name):
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        for name in norm_names(config):
            size = dim if name.startswith("self_attn.") else hidden
            shapes[f"{prefix}{name}.weight"] = (size,)
    return shapes


def has_bias(config: ModelConfig, matrix: str) -> bool:
    """Whether the named matrix of a layer has a bias."""
    if matrix.startswith("mlp."):
        return config.mlp_bias
    return config.output_bias if matrix.endswith("o_proj") else config.qkv_bias


def norm_names(config: ModelConfig) -> tuple[str, ...]:
    """Names of a layer's norms."""
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.sandwich_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if config.qk_norm:
        names += ["self_attn.q_norm", "self_attn.k_norm"]
    return tuple(names)


def check_shapes(config: ModelConfig, source: WeightSource) -> None:
    """Raise InvalidModelError for the first weight that is missing or has the wrong shape."""
    for name, shape in expected_shapes(config).items():
        found = source.shape(name)
        if found != shape:
            raise InvalidModelError(
                f"weight {name!r} has shape {found}, config.json asks for {shape}; "
                "use weights and config.json of the same model"
            )
