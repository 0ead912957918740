"""Weights from a Hugging Face directory into a decoder.

On the CPU, weights that are stored in the compute dtype stay memory-mapped: engines of one machine share the page
cache instead of each holding a copy.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from dualpath.models.card import ModelCard
from dualpath.models.checkpoint import check_tensors, weight_files
from dualpath.models.decoder import Decoder


def load_model(directory: Path, card: ModelCard, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The model in `directory`, ready to compute on `device` in `dtype`.

    Raises BadInputError when a file is missing or cut off, or when a tensor is missing, unexpected or misshapen."""
    files, expected = weight_files(directory), card.tensors()
    check_tensors(expected, files, tied=card.tied_embeddings)
    weights: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt", device=str(device)) as file:
            names = [name for name in file.keys() if name in expected]  # noqa: SIM118 (not a dict)
            weights |= {name: file.get_tensor(name).to(dtype) for name in names}
    return Decoder(card, weights)
