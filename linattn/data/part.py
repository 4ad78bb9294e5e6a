"""The description of a part of the data, which a run or a conversion keeps as JSON."""

from typing import NotRequired

from typing_extensions import TypedDict


class Part(TypedDict):
    """Describes the tokens for training or for validation. `lost_bytes` of the text's `bytes` cannot be restored from
    the tokens.

    `sha256` is the digest of the text. Documents that were rows are in Arrow files in the folder `shards`, from number
    `first` on, and `sha256` is the digest of all documents in these files."""

    documents: int
    bytes: int
    tokens: int
    lost_bytes: int
    sha256: str
    shards: NotRequired[str]
    first: NotRequired[int]


class Parts(TypedDict):
    training: Part
    validation: Part
