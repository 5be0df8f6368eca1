"""The base class of the values' sections, and the types of their fields."""

from __future__ import annotations

from datetime import timedelta
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

ResourceName = Annotated[str, Field(pattern=r"^[a-z0-9]([A-Za-z0-9./_-]*[A-Za-z0-9])?$")]
Quantities = dict[ResourceName, Quantity]

QuotaKey = Annotated[
    str,
    Field(
        pattern=r"^(pods|services(\.nodeports|\.loadbalancers)?|replicationcontrollers|resourcequotas|secrets|configmaps"
        r"|persistentvolumeclaims|((requests|limits)\.)?(cpu|memory|ephemeral-storage)|requests\.storage"
        r"|((requests|limits)\.)?hugepages-[0-9]+[KMG]i|count/[a-z0-9.-]+|requests\.[a-z0-9][a-z0-9.-]*/[A-Za-z0-9._-]+"
        r"|[a-z0-9][a-z0-9.-]*\.storageclass\.storage\.k8s\.io/(requests\.storage|persistentvolumeclaims))$"
    ),
]
"""What a ResourceQuota counts. Devices only with `requests.`: Kubernetes accepts `nvidia.com/gpu` and ignores it."""

ResourcePattern = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9./_-]*\*?$")]
"""A resource, or all whose names begin with what is before `*`."""

_PATH = r"(/([^/:.][^/:]*|\.[^/:.][^/:]*))+"
Path = Annotated[str, Field(pattern=f"^{_PATH}$")]
"""An absolute path below `/`, without `.`, `..` and a slash at its end."""

OptionalPath = Annotated[str, Field(pattern=f"^({_PATH})?$")]
"""The same; empty where there is none."""

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
Cidr = Annotated[
    str,
    Field(
        pattern=rf"^({_BYTE}(\.{_BYTE}){{3}}/(3[0-2]|[12]?[0-9])"
        r"|[0-9a-fA-F:]*:[0-9a-fA-F:]*/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))?$"
    ),
]
"""A range of IPv4 or IPv6 addresses; empty where there is none. The templates look at what a pattern cannot say."""

_ADDRESS = r"([A-Za-z0-9.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}"
Address = Annotated[str, Field(pattern=f"^{_ADDRESS}$")]
"""`host:port`; an IPv6 address has brackets."""
OptionalAddress = Annotated[str, Field(pattern=f"^({_ADDRESS})?$")]
Duration = Annotated[str, Field(pattern=r"^[1-9][0-9]*(s|m|h|d)$")]
"""A duration as Prometheus writes it, such as 15m."""
OptionalDuration = Annotated[str, Field(pattern=r"^([1-9][0-9]*(s|m|h|d))?$")]
_UNITS = {"s": timedelta(seconds=1), "m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}


def duration(text: str) -> timedelta | None:
    """An OptionalDuration as a time; None if it is empty."""
    return int(text[:-1]) * _UNITS[text[-1]] if text else None


PortNumber = Annotated[int, Field(ge=1, le=65535)]
UserId = Annotated[int, Field(ge=1, le=2**31 - 1)]
_WORD = "[a-z0-9]+([._-]+[a-z0-9]+)*"
Repository = Annotated[str, Field(pattern=rf"^(([A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{{1,5}})?/)?{_WORD}(/{_WORD})*)?$")]
"""A repository of images, without a tag; empty where there is none."""

ImageTag = Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64}|[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$")]
"""A tag, or a digest; empty for a default."""

FolderOrUrl = Annotated[str, Field(pattern=r"^(/[^ ]+|[a-z][a-z0-9+.-]*://[^ ]+)?$")]
"""An absolute path, or a URL with its scheme; empty where there is none."""

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
