"""What is sent to Flyte 1 of a task. Apart from the tests of all workflows, which take seconds to import."""

from collections import OrderedDict

from flytekit.configuration import FastSerializationSettings, Image, ImageConfig, SerializationSettings
from flytekit.tools.translator import get_serializable

IMAGE = Image(name="default", fqn="registry.example/strata", tag="1")
SETTINGS = SerializationSettings(
    project="p",
    domain="d",
    version="v",
    image_config=ImageConfig(default_image=IMAGE, images=[IMAGE]),
    env={},
    fast_serialization_settings=FastSerializationSettings(enabled=False),
)


def template(task):
    return get_serializable(OrderedDict(), SETTINGS, task).template
