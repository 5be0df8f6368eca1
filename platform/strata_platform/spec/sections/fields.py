"""The base class of the spec's sections, and the types of their fields."""

from __future__ import annotations

import hashlib
import json
from types import UnionType
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from strata_platform.redact import has_credentials, secret_parameter
from strata_platform.spec.describe import Allowed
from strata_platform.spec.problems import spec_error
from strata_platform.spec.yaml_core import meaning_in_yaml_1_1, parse_number


def number(value: object) -> object:
    """Reject `true`, which Python takes for 1; read text that is a number in YAML 1.2, such as `"8"` or `"1e3"`."""
    if isinstance(value, bool):
        raise ValueError("not a number")
    if not isinstance(value, str):
        return value
    found = parse_number(value)
    if found is None:
        raise ValueError(f"not a number{_meant(value, int | float)}")
    return found


def _only_boolean(value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError(f"not true or false{_meant(value, bool)}")
    return value


def _meant(value: object, kind: type | UnionType) -> str:
    """For a text that YAML 1.1 takes for a value of this kind: that value, to write instead."""
    meaning = meaning_in_yaml_1_1(value) if isinstance(value, str) else None
    if not isinstance(meaning, kind) or (kind is not bool and isinstance(meaning, bool)):
        return ""
    return f": YAML 1.1 reads it as {json.dumps(meaning)}, YAML 1.2 as text; write {json.dumps(meaning)}"


def _number_as_text(value: object) -> object:
    """Accept `cpu: 2` for `cpu: "2"`."""
    return str(value) if type(value) in (int, float) else value


def _without_credentials(value: Any) -> Any:
    for text in (value,) if isinstance(value, str) else value:
        if has_credentials(text):
            raise ValueError(
                "a URL with credentials, which every copy of the spec would contain; set them in the environment"
            )
        if name := secret_parameter(text):
            raise ValueError(
                f"a URL with {name!r} in its query, which grants access to every reader of the spec; give the store's "
                "own URL, such as s3://bucket/path, with its credentials in the environment, or fetch the file first"
            )
    return value


def _path(value: str) -> str:
    if "://" in value:
        raise ValueError("a URL, not a folder; checkpoint.url copies checkpoints there, and export.url the model")
    if value.startswith("~"):
        # Path does not expand it, and the run may have another home folder.
        raise ValueError("begins with ~, another folder for every user and machine; write the path out")
    if "\n" in value or "\r" in value:
        raise ValueError("has a line break in it; put the path in one line")
    return value


def _without_null(value: str) -> str:
    if "\0" in value:
        raise ValueError("has a null character, which no name or path can have; remove it")
    return value


def _storable(arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"cannot be stored as JSON ({error}); give numbers, texts, true, false, null, or lists of them"
        ) from None
    return arguments


LONGEST_NAME = 53

Integer = Annotated[int, BeforeValidator(number)]
Number = Annotated[float, BeforeValidator(number)]
# More steps, rows or seconds than any run has: a larger number is a mistake, and would overflow somewhere later.
Count = Annotated[int, Field(ge=1, le=10**9), BeforeValidator(number)]
Decay = Annotated[float, Field(ge=0, lt=1), BeforeValidator(number)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_without_null)]
HostAndPort = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?:[0-9]{1,5}$"),
    Allowed("host:port, such as generation:8471"),
]
Folder = Annotated[Text, AfterValidator(_path), Allowed("the path of a folder")]
FolderOrUrl = Annotated[Text, AfterValidator(_without_credentials)]
Sources = Annotated[
    Text | Annotated[tuple[Text, ...], Field(min_length=1)],
    AfterValidator(_without_credentials),
    Allowed("text or a list of text, not empty"),
]
ObjectStoreUrl = Annotated[
    str,
    Field(pattern=r"^[a-z0-9+.-]+://.+$"),
    AfterValidator(_without_credentials),
    Allowed("a URL without credentials"),
]
Flag = Annotated[bool, BeforeValidator(_only_boolean)]
Name = Annotated[
    str,
    Field(pattern=rf"^[a-z0-9]([a-z0-9-]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?$"),
    Allowed(f"up to {LONGEST_NAME} lower-case letters, digits and inner dashes"),
]
GpuResource = Annotated[
    str,
    Field(pattern=r"^(nvidia|amd)\.com/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"),
    Allowed("a resource of NVIDIA's or AMD's device plugin, such as amd.com/gpu; other devices are not supported"),
]
_QuantityText = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Quantity = Annotated[
    _QuantityText,
    BeforeValidator(_number_as_text, json_schema_input_type=_QuantityText | Annotated[float, Field(ge=0)]),
    Allowed("a Kubernetes quantity such as 2, 500m or 8Gi"),
]


_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
ObjectName = Annotated[
    str,
    Field(pattern=rf"^({_MODULE}:[A-Za-z_]\w*|entry-point:[\w.-]+)$"),
    Allowed("`module:Class`, or `entry-point:name` of an installed package"),
]
FunctionName = Annotated[str, Field(pattern=rf"^{_MODULE}:[A-Za-z_]\w*$"), Allowed("`module:function`")]
Arguments = Annotated[dict[str, Any], AfterValidator(_storable), Allowed("a mapping of names to values")]


class Section(BaseModel):
    """Base of every section of the spec: frozen, unknown fields are errors.

    Raises SpecError, with every problem, where pydantic would raise ValidationError. A value is converted only if
    nothing is lost: `"8"` and `8.0` are 8, a list is a tuple; but `true` is not 1, `"yes"` is not true and 8.5 is
    not 8.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise spec_error(type(self), error) from None

    # Tells pydantic that this __init__ only calls its own and can be skipped for nested sections.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """As pydantic's, but raises SpecError."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise spec_error(cls, error) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """As pydantic's, but raises SpecError."""
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as error:
            raise spec_error(cls, error) from None

    def hash(self) -> str:
        """The first 16 hex digits of the SHA-256 of the values, defaults included."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]
