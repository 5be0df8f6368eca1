"""The section `export`: formats and destinations of the trained model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strata_platform.spec.describe import Allowed
from strata_platform.spec.sections.fields import Flag, ObjectStoreUrl, Section

Format = Literal["safetensors", "gguf", "fp8", "int4", "adapter"]


class Export(Section):
    """Formats of the trained model, which is written to the folder `model` of the run, and further destinations.

    Every format is verified before the model is copied.
    """

    formats: tuple[Format, ...] = Field(
        ("safetensors",),
        description="Formats of the model. `safetensors`, the Hugging Face folder, is always written; the others are "
        "made from it. `gguf`: a file for llama.cpp, Ollama and LM Studio; needs the extra `gguf`. `fp8`, `int4`: a "
        "folder of that name with quantized linear layers, for vLLM; needs the extra `compressed-tensors`. `adapter`: "
        "the adapter in PEFT's format, in the folder `adapter`.",
    )
    gguf_type: Literal["f32", "f16", "bf16", "q8_0"] = Field(
        "f16", description="Data type of the matrices in the GGUF file, by llama.cpp's names."
    )

    push_to_hub: (
        Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$"), Allowed("a name such as organization/model")] | None
    ) = Field(
        None,
        description="Repository on the Hugging Face Hub to upload the model to; created if it does not exist. The "
        "token comes from the environment variable HF_TOKEN.",
    )
    private: Flag = Field(True, description="Create the repository of `push_to_hub` as private.")
    url: ObjectStoreUrl | None = Field(
        None,
        description="Object store, such as `s3://bucket/models`. The model is copied to the folder `<url>/<name>`. "
        "Credentials come from the environment.",
    )
