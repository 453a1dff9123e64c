"""Expert weights in NVFP4, as ModelOpt and compressed-tensors checkpoints store them.

Two codes a byte, low nibble first; an e4m3 scale for 16 values along the input dimension; one fp32 global scale for
each expert and matrix. w13 holds the gate rows first, then the up rows.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import ModuleType

import torch
from torch import Tensor

from ep_a2a.testing.nvfp4 import BLOCK, E2M1_MAX, E4M3_MAX, MIN_GLOBAL_SCALE, decode_nvfp4, encode_nvfp4


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The weights of the experts that one rank owns; H = hidden, I = intermediate size, both multiples of 16.

    Raises TypeError for a wrong dtype, ValueError for shapes or devices that do not fit together.
    """

    w13: Tensor  # [E, 2I, H/2] uint8, gate rows first
    w13_scales: Tensor  # [E, 2I, H/16] float8_e4m3fn
    w13_global: Tensor  # [E] float32
    w2: Tensor  # [E, H, I/2] uint8
    w2_scales: Tensor  # [E, H, I/16] float8_e4m3fn
    w2_global: Tensor  # [E] float32

    def __post_init__(self) -> None:
        wanted = (torch.uint8, torch.float8_e4m3fn, torch.float32) * 2
        for field, dtype in zip(fields(self), wanted, strict=True):
            tensor = getattr(self, field.name)
            if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
                found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(f"{field.name} is {found}: must be a tensor of {dtype}")
            if tensor.device != self.w13.device:
                raise ValueError(f"{field.name} is on {tensor.device}, w13 on {self.w13.device}: must be one device")
        if self.w13.dim() != 3 or self.w2.dim() != 3:
            raise ValueError(
                f"w13 is {tuple(self.w13.shape)}, w2 {tuple(self.w2.shape)}: must be [E, 2I, H/2] and [E, H, I/2]"
            )
        num_experts, hidden, intermediate = self.num_experts, self.hidden, self.intermediate
        if hidden % BLOCK or intermediate % BLOCK or 0 in (hidden, intermediate):
            raise ValueError(f"hidden={hidden}, intermediate={intermediate}: both must be multiples of {BLOCK}")
        shapes = {
            "w13": (num_experts, 2 * intermediate, hidden // 2),
            "w13_scales": (num_experts, 2 * intermediate, hidden // BLOCK),
            "w13_global": (num_experts,),
            "w2": (num_experts, hidden, intermediate // 2),
            "w2_scales": (num_experts, hidden, intermediate // BLOCK),
            "w2_global": (num_experts,),
        }
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"{name} is {tuple(getattr(self, name).shape)}: must be {shape} for {num_experts} experts, "
                    f"hidden={hidden}, intermediate={intermediate}"
                )

    @property
    def num_experts(self) -> int:
        """Experts of this rank; 0 is allowed."""
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        """Values of a token."""
        return self.w13.shape[2] * 2

    @property
    def intermediate(self) -> int:
        """Values between the two products."""
        return self.w2.shape[2] * 2

    @property
    def device(self) -> torch.device:
        """Where all tensors lie."""
        return self.w13.device

    @property
    def bytes(self) -> int:
        """Memory of all tensors."""
        return sum(t.numel() * t.dtype.itemsize for t in self._tensors().values())

    @classmethod
    def quantize(cls, w13: Tensor, w2: Tensor) -> ExpertWeights:
        """Encode float weights; the global scale of an expert's matrix is its largest magnitude / 2688. Local.

        w13  [E, 2I, H] bfloat16, float16 or float32, gate rows first
        w2   [E, H, I]

        Raises TypeError for another dtype, ValueError for shapes that do not fit or values that are not finite.
        """
        if w13.dim() != 3 or w2.dim() != 3 or w13.shape[1] % 2:
            raise ValueError(f"w13 is {tuple(w13.shape)}, w2 {tuple(w2.shape)}: must be [E, 2I, H] and [E, H, I]")
        return cls(*_encode("w13", w13), *_encode("w2", w2))

    def decoded(self, expert: int) -> tuple[Tensor, Tensor]:
        """The fp32 weights of one local expert, 0 to num_experts - 1: (w13 [2I, H], w2 [H, I]). Local.

        Raises IndexError for an expert that is not here.
        """
        if not 0 <= expert < self.num_experts:
            raise IndexError(f"expert {expert}: this rank holds local experts 0 to {self.num_experts - 1}")
        return (
            decode_nvfp4(self.w13[expert], self.w13_scales[expert], self.w13_global[expert]),
            decode_nvfp4(self.w2[expert], self.w2_scales[expert], self.w2_global[expert]),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all tensors, under their field names, to a safetensors file. Raises ImportError without safetensors."""
        _safetensors().save_file({name: t.contiguous() for name, t in self._tensors().items()}, os.fspath(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str = "cpu") -> ExpertWeights:
        """Read what `save` wrote. Raises ImportError without safetensors, ValueError where a tensor is missing."""
        found: Mapping[str, Tensor] = _safetensors().load_file(os.fspath(path), device=device)
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in found]
        if missing:
            raise ValueError(f"{os.fspath(path)} lacks {', '.join(missing)}; it holds {', '.join(sorted(found))}")
        return cls(**{name: found[name] for name in names})

    def _tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _encode(name: str, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode [E, rows, columns], one expert at a time, with one global scale for each expert."""
    num_experts, num_rows, num_columns = w.shape
    packed = torch.empty(num_experts, num_rows, num_columns // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(num_experts, num_rows, num_columns // BLOCK, dtype=torch.float8_e4m3fn, device=w.device)
    global_scale = torch.ones(num_experts, device=w.device)
    for expert in range(num_experts):
        bad = int((~w[expert].isfinite()).sum())
        if bad:
            raise ValueError(f"{name}, expert {expert}: {bad} of {num_rows * num_columns} weights are not finite")
        amax = w[expert].float().abs().amax()
        if amax > 0:
            limit = torch.full_like(amax, E2M1_MAX * E4M3_MAX)
            global_scale[expert] = (amax / limit).clamp(min=MIN_GLOBAL_SCALE)
        packed[expert], scales[expert], _ = encode_nvfp4(w[expert], global_scale[expert])
    return packed, scales, global_scale


def _safetensors() -> ModuleType:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError("weights are saved and loaded with safetensors: pip install safetensors") from error
