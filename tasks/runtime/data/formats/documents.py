"""Documents: segments of text in order, before they are tokenized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tasks.runtime.data.formats.teacher_columns import TopTokens


class Segment(NamedTuple):
    """A piece of text that is tokenized separately.

    generated: the model has to generate it, so it carries loss.
    control: special tokens that it contains are control tokens; otherwise they are text like any other.
    context: it carries no loss, even if all tokens do.
    """

    text: str
    generated: bool
    control: bool = True
    context: bool = False


class Tokens(NamedTuple):
    """A document that was tokenized beforehand: ids [n], int32, and targets [n], bool, which carry loss."""

    ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Document:
    """Segments in order.

    has_special_tokens: a template rendered the text, so no special tokens are added around it.
    score: the number that the row gives to it; see `scores`.
    begins, ends: whether the document begins and ends here, rather than in another row; see `Row`.
    media: the bytes of the images or audio that its text has tokens for, in order.
    tokens: in the place of segments, what they would be tokenized to.
    top_tokens: of a teacher, for each of its tokens or for each that carries loss.
    columns: of a prompt, what rewards get of its row, as JSON.
    """

    segments: tuple[Segment, ...]
    has_special_tokens: bool
    begins: bool = True
    ends: bool = True
    score: float | None = None
    media: tuple[bytes, ...] = ()
    tokens: Tokens | None = None
    top_tokens: TopTokens | None = None
    columns: bytes | None = None
