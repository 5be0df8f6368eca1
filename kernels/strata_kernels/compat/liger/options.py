"""Base class of Liger's losses as modules: options of the constructor, passed by keyword in `forward`."""

from __future__ import annotations

from typing import Any

from torch import nn


class WithOptions(nn.Module):
    """A loss module whose options are attributes, as in Liger.

    function: the class with `apply`.
    defaults: options in the order of Liger's constructor, by their names in `apply`.
    """

    function: Any
    defaults: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        if len(args) > len(self.defaults):
            raise TypeError(f"{type(self).__name__} takes {', '.join(self.defaults)}")
        given = dict(zip(self.defaults, args, strict=False)) | kwargs
        if unknown := given.keys() - self.defaults.keys():
            raise TypeError(f"{type(self).__name__} takes {', '.join(self.defaults)}, not {', '.join(unknown)}")
        self.options = {**self.defaults, **given}
        for name, value in self.options.items():
            setattr(self, name, value)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result for these arguments and the options."""
        return self.function.apply(*args, **kwargs, **{name: getattr(self, name) for name in self.defaults})
