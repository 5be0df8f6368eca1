"""The section `export`: where the trained model goes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from strata_platform.spec.describe import Allowed
from strata_platform.spec.fields import Flag, ObjectStoreUrl, Section


class Export(Section):
    """Where the trained model goes, besides the run's folder `model`. Every copy is verified first."""

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
