"""The settings of a model's processor of images, where each supported version of transformers has them."""

from typing import ClassVar

import pytest

from tasks.runtime.data.media.media_processor import _image_settings


class Processor:
    """As transformers 5.17 writes InternVL's."""


class ProcessorKwargs:
    _defaults: ClassVar = {"images_kwargs": {"crop_to_patches": True}, "text_kwargs": {"padding": False}}


class LaterProcessor:
    """As transformers 5.23 writes InternVL's."""

    images_kwargs: ClassVar = {"crop_to_patches": True}


class PlainProcessor:
    pass


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(Processor, {"crop_to_patches": True}), (LaterProcessor, {"crop_to_patches": True}), (PlainProcessor, {})],
)
def test_settings_of_images_are_those_of_the_whole_processor(kind, settings):
    assert _image_settings(kind()) == settings
