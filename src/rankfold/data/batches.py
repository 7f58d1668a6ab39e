"""What a model is measured on, as a whole and in batches.

Windows of token ids are one tensor, images too. Image-text examples differ in length and in the sizes of their images:
each is a batch of its own, so nothing is padded and no padding token is ever measured.

Shape legend: S samples, B samples of a batch, T tokens.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..architectures import Part
from ..errors import DataError

Inputs = Mapping[str, Tensor]  # of the model's forward, by name


@dataclass(frozen=True)
class Example:
    """One image-text example, or one image of any size, as the model's own processor gives it."""

    ids: Tensor | None  # (1, T) int64; None: an image alone
    tokens: int  # those in whose places images stand among them; of an image alone its patches
    sha256: str  # of all inputs
    images: bool  # whether there is any
    read: Callable[[], Inputs] = field(repr=False)  # all inputs; images are large, so they are made when wanted

    @classmethod
    def of(cls, inputs: Inputs, read: Callable[[], Inputs] | None = None) -> "Example":
        """Out of the inputs themselves, kept unless they can be ``read`` again."""
        ids, read = inputs.get("input_ids"), read or (lambda: inputs)
        if ids is None:
            return cls(None, len(inputs["hidden_states"]), _digest(inputs), True, read)
        return cls(ids, ids.shape[1], _digest(inputs), "pixel_values" in inputs, read)

    @classmethod
    def made_by(cls, make: Callable[[], Inputs], where: str) -> "Example":
        """Out of what is made anew whenever it is wanted, and must stay the same.

        Args:
            where: named in the message.
        """

        def read() -> Inputs:
            inputs = make()
            if _digest(inputs) != example.sha256:
                raise DataError(f"{where}: an image changed while it was in use; start again")
            return inputs

        example = cls.of(make(), read)
        return example


Batch = Tensor | Example  # (B, T) token ids, (B, C, H, W) pixels, or an example
Data = Tensor | tuple[Example, ...]


def batches(data: Data, most: int, part: Part) -> Sequence[Batch]:
    """Batches of at most so many tokens, and of at least one sample; of examples one each."""
    if not isinstance(data, Tensor) or not len(data):
        return tuple(data)
    return data.split(max(1, most // part.length_of(data)))


def again(data: Data, hidden: Sequence[Tensor]) -> Sequence[Batch]:
    """The batches that these ``(B, T, D)`` were made of."""
    return data.split([len(h) for h in hidden]) if isinstance(data, Tensor) else data


def shard_of(data: Data, shards: range, of: int) -> Data:
    """Return the samples in some of the ``of`` contiguous parts of nearly one length that they are cut into."""
    return data[shards.start * len(data) // of : shards.stop * len(data) // of]


def ids_of(batch: Batch) -> Tensor | Inputs:
    """Token ids ``(B, T)``, placeholders of images among them; pixels; or all inputs of an image alone."""
    if isinstance(batch, Tensor):
        return batch
    return batch.read() if batch.ids is None else batch.ids


def noise(part: Part, samples: int, length: int) -> Data:
    """What a part can be run on without any data, so many tokens or patches at least."""
    example = part.example(samples, length)
    return example if isinstance(example, Tensor) else (Example.of(example),)


def tokens_in(data: Data, part: Part) -> int:
    """Of all windows, patches of all images, or of all examples, image tokens among them."""
    if isinstance(data, Tensor):
        return len(data) * part.length_of(data)
    return sum(example.tokens for example in data)


def length_of(data: Data, part: Part) -> int:
    """Tokens of a window, patches of an image, or what an example has on average, rounded down."""
    return tokens_in(data, part) // len(data)


def first(data: Data, tokens: int, part: Part) -> Data:
    """As many of the first samples as have so many tokens; all where there are fewer."""
    if isinstance(data, Tensor):
        return data[: -(-tokens // part.length_of(data))]
    ends = torch.tensor([example.tokens for example in data]).cumsum(0)
    return data[: int((ends < tokens).sum()) + 1]


def digest_of(data: Data) -> str:
    """SHA-256 of the numbers, in hexadecimal, its first half."""
    if isinstance(data, Tensor):
        return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:32]
    return hashlib.sha256("".join(example.sha256 for example in data).encode()).hexdigest()[:32]


def _digest(inputs: Inputs) -> str:
    digest = hashlib.sha256()
    add_tensors(digest, inputs)
    return digest.hexdigest()[:32]


def add_tensors(digest, tensors: Mapping[str, Tensor]) -> None:
    """Add names, types, shapes and numbers to a hash."""
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())


def as_tensors(data: Data) -> dict[str, Tensor]:
    """By name, for a file; :func:`as_data` reads them."""
    if isinstance(data, Tensor):
        return {"ids": data}
    return {
        f"{number}.{name}": tensor.contiguous()
        for number, example in enumerate(data)
        for name, tensor in example.read().items()
    }


def as_data(tensors: Mapping[str, Tensor]) -> Data:
    """Out of what :func:`as_tensors` gave.

    Raises:
        KeyError, ValueError: it is something else.
    """
    if "ids" in tensors:
        return tensors["ids"]
    rows: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        rows.setdefault(int(number), {})[name] = tensor
    return tuple(Example.of(rows[number]) for number in range(len(rows)))
