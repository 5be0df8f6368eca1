"""The section `export`: where the trained model goes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strata_platform.spec.describe import Allowed
from strata_platform.spec.sections.fields import Flag, ObjectStoreUrl, Section

Format = Literal["safetensors", "gguf", "fp8", "int4", "adapter"]


class Export(Section):
    """In which formats the trained model is written to the run's folder `model`, and where else it goes.

    Every format is verified before it is copied.
    """

    formats: tuple[Format, ...] = Field(
        ("safetensors",),
        description="`safetensors`, the Hugging Face folder, is always written; the others are made from it. `gguf`: a "
        "file for llama.cpp, Ollama and LM Studio; needs the extra `gguf`. `fp8`, `int4`: a folder of that name with "
        "quantized linear layers, for vLLM; needs the extra `compressed-tensors`. `adapter`: the adapter alone in the "
        "folder `adapter`, as PEFT saves it.",
    )
    gguf_type: Literal["f32", "f16", "bf16", "q8_0"] = Field(
        "f16", description="Type of the matrices in the GGUF file, by llama.cpp's names."
    )

    push_to_hub: (
        Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$"), Allowed("a name such as organization/model")] | None
    ) = Field(
        None,
        description="Repository on the Hugging Face Hub, created if it does not exist. The token comes from the "
        "environment variable HF_TOKEN.",
    )
    private: Flag = Field(True, description="Create the repository as private.")
    url: ObjectStoreUrl | None = Field(
        None,
        description="Object store, such as `s3://bucket/models`; the model is copied to its folder `<url>/<name>`. "
        "Credentials come from the environment.",
    )
