"""The base class of the values' sections, and the types of their fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel


class Values(BaseModel):
    """Base of every section: camelCase as in Helm's own charts, frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
    )


DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""A Kubernetes name of up to 63 lower-case letters, digits and inner dashes."""

DnsName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""A Kubernetes name that may have dots."""

OptionalDnsName = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$")]
"""The same; empty where there is none."""

LabelKey = Annotated[
    str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")
]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]
Labels = dict[LabelKey, LabelValue]
Annotations = dict[LabelKey, str]

_NUMBER = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"

Quantity = Annotated[
    Annotated[str, Field(pattern=f"^{_NUMBER}$")] | Annotated[int, Field(ge=0)],
    # One schema instead of a choice of two, so that Helm reports a mistake in one line.
    WithJsonSchema({"type": ["string", "integer"], "pattern": f"^{_NUMBER}$", "minimum": 0}),
]
"""A Kubernetes quantity such as 8, 500m or 64Gi."""

OptionalQuantity = Annotated[
    Annotated[str, Field(pattern=f"^({_NUMBER})?$")] | Annotated[int, Field(ge=0)],
    WithJsonSchema({"type": ["string", "integer"], "pattern": f"^({_NUMBER})?$", "minimum": 0}),
]
"""The same; empty where there is none."""

ResourceName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9./_-]*[a-z0-9])?$")]
Quantities = dict[ResourceName, Quantity]

Path = Annotated[str, Field(pattern=r"^/[^:]*$")]
"""An absolute path."""

OptionalPath = Annotated[str, Field(pattern=r"^(/[^:]*)?$")]
"""An absolute path; empty where there is none."""

Cidr = Annotated[
    str, Field(pattern=r"^([0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2}|[0-9a-fA-F:]*:[0-9a-fA-F:]*/[0-9]{1,3})?$")
]
"""A range of IPv4 or IPv6 addresses; empty where there is none."""

Address = Annotated[str, Field(pattern=r"^([A-Za-z0-9.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}$")]
"""`host:port`; an IPv6 address has brackets."""

PortNumber = Annotated[int, Field(ge=1, le=65535)]
UserId = Annotated[int, Field(ge=1, le=2**31 - 1)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
