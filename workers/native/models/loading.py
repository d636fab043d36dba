"""Builds a Decoder from a Hugging Face-style folder or straight from a GGUF file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from workers.native.models.config import ModelConfig
from workers.native.models.cpu_kernel import CpuKernel, load_cpu_kernel
from workers.native.models.decoder import Decoder
from workers.native.models.errors import InvalidModelError
from workers.native.models.gguf_file import GgufFile
from workers.native.models.gguf_weights import GgufWeights
from workers.native.models.hf_config import model_config_from_dict, read_model_config
from workers.native.models.layer import DecoderLayer, LayerWeights
from workers.native.models.norm import RmsNorm
from workers.native.models.projection import PanelProjection, PlainProjection, Projection
from workers.native.models.weights import (
    SafetensorsWeights,
    WeightSource,
    check_shapes,
)


def load_decoder(
    path: Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Decoder:
    """Load the model in `path`: a folder with config.json and safetensors, or a GGUF file.

    Weights are converted to `dtype` and moved to `device`; a quantised GGUF file is dequantised.
    Raises InvalidModelError for missing or contradicting files and UnsupportedModelError for a
    model the engine does not implement.
    """
    target = torch.device(device)
    if path.is_file():
        file = GgufFile(path)
        gguf_config = model_config_from_dict(file.hf_config(dtype))
        return build_decoder(gguf_config, GgufWeights(file), dtype=dtype, device=target)
    if not path.is_dir():
        raise InvalidModelError(f"{path} does not exist; name a model folder or a GGUF file")
    config = read_model_config(path)
    with SafetensorsWeights(path) as source:
        return build_decoder(config, source, dtype=dtype, device=target)


@torch.inference_mode()
def build_decoder(
    config: ModelConfig, source: WeightSource, *, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Fuse, transpose and convert the weights of `source`, and build the Decoder around them."""
    check_shapes(config, source)
    on_cpu = device.type == "cpu" and dtype == torch.float32
    kernel = load_cpu_kernel() if on_cpu else None
    builder = _Builder(config, source, kernel, dtype, device)
    layers = [DecoderLayer(config, i, builder.layer(i)) for i in range(config.layers)]
    embedding = source.tensor("model.embed_tokens.weight")
    head_weight = embedding if config.tie_embeddings else source.tensor("lm_head.weight")
    return Decoder(
        config,
        embedding=None if config.tie_embeddings else embedding.to(device, dtype, copy=True),
        layers=layers,
        final_norm=builder.norm("model.norm.weight"),
        head=builder.product([head_weight], None),
        dtype=dtype,
        device=device,
        cpu_kernel=kernel,
    )


class _Builder:
    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        kernel: CpuKernel | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._source = source
        self._kernel = kernel
        self._dtype = dtype
        self._device = device

    def norm(self, name: str) -> RmsNorm:
        weight = self._source.tensor(name).to(self._device, torch.float32, copy=True)
        weight.add_(self._config.norm_weight_offset)
        return RmsNorm(weight, self._config.norm_eps, self._kernel)

    def projection(self, prefix: str, *names: str) -> Projection:
        weights = [self._source.tensor(f"{prefix}{name}.weight") for name in names]
        bias = None
        if f"{prefix}{names[0]}.bias" in self._source.names():
            biases = [self._source.tensor(f"{prefix}{name}.bias") for name in names]
            bias = torch.cat(biases).to(self._device, self._dtype)
        return self.product(weights, bias)

    def product(self, weights: list[Tensor], bias: Tensor | None) -> Projection:
        parts = [weight.to(self._device, self._dtype) for weight in weights]
        if self._kernel is not None and PanelProjection.fits(parts):
            return PanelProjection(self._kernel, parts, bias)
        return PlainProjection(parts, bias)

    def layer(self, index: int) -> LayerWeights:
        # Gemma calls the norm before the MLP `pre_feedforward_layernorm`, the Llama family
        # `post_attention_layernorm`, which with Gemma follows the attention output.
        prefix = f"model.layers.{index}."
        sandwich = self._config.sandwich_norms
        mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        return LayerWeights(
            attention_norm=self.norm(f"{prefix}input_layernorm.weight"),
            qkv=self.projection(f"{prefix}self_attn.", "q_proj", "k_proj", "v_proj"),
            output=self.projection(f"{prefix}self_attn.", "o_proj"),
            mlp_norm=self.norm(f"{prefix}{mlp_norm}.weight"),
            gate_up=self.projection(f"{prefix}mlp.", "gate_proj", "up_proj"),
            down=self.projection(f"{prefix}mlp.", "down_proj"),
            query_norm=self._optional(self._config.qk_norm, f"{prefix}self_attn.q_norm"),
            key_norm=self._optional(self._config.qk_norm, f"{prefix}self_attn.k_norm"),
            post_attention_norm=self._optional(sandwich, f"{prefix}post_attention_layernorm"),
            post_mlp_norm=self._optional(sandwich, f"{prefix}post_feedforward_layernorm"),
        )

    def _optional(self, present: bool, name: str) -> RmsNorm | None:
        return self.norm(f"{name}.weight") if present else None
