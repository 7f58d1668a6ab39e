"""Tensors of a GGUF file, de-quantised one by one.

Transformers knows what a tensor is called and how its rows lie, and de-quantises whole models; here it is asked about
one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from .._utils.present import present
from .weights import TensorReader, untied_state


class GgufWeights(TensorReader):
    """Tensors of a file by parameter name, in fp32.

    Args:
        tensors: parameter name -> tensor of the file.
        processor: of transformers, for this architecture: puts rows in the order of the model.
    """

    def __init__(self, file: Path, tensors: dict[str, Any], processor: TensorProcessor):
        super().__init__(file)
        self.tensors, self.processor = tensors, processor

    def _tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        from gguf.quants import dequantize

        for name in names:
            stored = self.tensors[name]
            values = dequantize(stored.data, stored.tensor_type)
            ordered = self.processor.process(weights=values, name=stored.name, parsed_parameters={"tensors": {}})
            yield name, torch.from_numpy(ordered.weights.copy())


def stream_gguf(file: Path, model: PreTrainedModel) -> GgufWeights | None:
    """Return the tensors of a file by the names of a model, which may be empty.

    ``None`` where they are not those of the model, one for one: experts lie in other parts, and a file may have too
    many or too few.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    architecture = present(reader.get_field("general.architecture")).contents()
    settings = load_gguf_checkpoint(file, return_tensors=False)["config"]
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=settings)
    try:
        names = get_gguf_hf_weights_map(model, processor)
    except NotImplementedError:  # what transformers does not read is refused where it is read as a whole
        return None
    known = [tensor for tensor in reader.tensors if tensor.name in names]
    tensors = {names[tensor.name]: tensor for tensor in known}
    state = model.state_dict()
    if len(tensors) < len(known) or tensors.keys() != untied_state(model).keys():
        return None
    fits = all(tensor.n_elements == state[name].numel() for name, tensor in tensors.items())
    return GgufWeights(file, tensors, processor) if fits else None
