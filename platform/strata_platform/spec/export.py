"""Where the trained model goes: the section `export`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from strata_platform.spec.describe import Allowed
from strata_platform.spec.fields import Flag, ObjectStoreUrl, Section


class Export(Section):
    """Where the trained model goes, beside the folder `model` of the run. Whatever is copied was verified before."""

    push_to_hub: (
        Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$"), Allowed("a name such as organization/model")] | None
    ) = Field(
        None,
        description="Repository on the Hugging Face Hub, which is created where it is not there. Its token is the "
        "environment's, HF_TOKEN.",
    )
    private: Flag = Field(True, description="A repository that is created is private.")
    url: ObjectStoreUrl | None = Field(
        None,
        description="Object store, such as `s3://bucket/models`, to whose folder `<url>/<name>` the model is copied. "
        "Credentials are the environment's.",
    )
