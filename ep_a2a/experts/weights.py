"""Expert weights in 4 bits, as checkpoints store them.

Two codes a byte, low nibble first. NVFP4 as ModelOpt and compressed-tensors: an e4m3 scale for 16 values along the
input dimension, one fp32 global scale for each expert and matrix. MXFP4 as gpt-oss: a ue8m0 scale for 32 values.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from types import ModuleType

import torch
from torch import Tensor

from ep_a2a.layout import MXFP4, NVFP4, Format
from ep_a2a.testing.formats import decode_format, encode_format
from ep_a2a.testing.nvfp4 import E2M1_MAX, E4M3_MAX, MIN_GLOBAL_SCALE, encode_nvfp4

WEIGHT_FORMATS = (NVFP4, MXFP4)


class GateOrder(Enum):
    """How w13 and b13 hold the rows of gate and up; without meaning where there is one matrix."""

    GATE_FIRST = "all of gate, then all of up"
    UP_FIRST = "all of up, then all of gate"
    INTERLEAVED = "gate, up, gate, up, as gpt-oss"

    def gate_first(self, rows: Tensor) -> Tensor:
        """The 2I rows, all of gate first. Local."""
        if self is GateOrder.GATE_FIRST:
            return rows
        parts = rows.chunk(2)[::-1] if self is GateOrder.UP_FIRST else (rows[0::2], rows[1::2])
        return torch.cat(tuple(parts))


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The weights of the experts that one rank owns; H = hidden, I = intermediate size, both multiples of the block.

    w13 has R rows: 2I, gate and up in `gate_order`, or I for an activation of one matrix.

    Raises TypeError for a wrong dtype, ValueError for shapes or devices that do not fit together.
    """

    w13: Tensor  # [E, R, H/2] uint8
    w13_scales: Tensor  # [E, R, H/16] float8_e4m3fn; MXFP4: [E, R, H/32] float8_e8m0fnu
    w13_global: Tensor | None  # [E] float32; MXFP4: None
    w2: Tensor  # [E, H, I/2] uint8
    w2_scales: Tensor  # [E, H, I/16], or [E, H, I/32]
    w2_global: Tensor | None
    b13: Tensor | None = None  # [E, R] float32 or bfloat16, rows as in w13
    b2: Tensor | None = None  # [E, H], added before the routing weight
    format: Format = field(default=NVFP4, kw_only=True)
    gate_order: GateOrder = field(default=GateOrder.GATE_FIRST, kw_only=True)

    def __post_init__(self) -> None:
        if self.format not in WEIGHT_FORMATS:
            raise ValueError(_unknown(self.format))
        for name, legal in self._dtypes().items():
            tensor = getattr(self, name)
            found = tensor.dtype if isinstance(tensor, Tensor) else None if tensor is None else type(tensor).__name__
            if found not in legal:
                raise TypeError(f"{name} is {found}: must be {' or '.join(map(str, legal))} for {self.format} weights")
            if isinstance(tensor, Tensor) and tensor.device != self.w13.device:
                raise ValueError(f"{name} is on {tensor.device}, w13 on {self.w13.device}: must be one device")
        if self.w13.dim() != 3 or self.w2.dim() != 3:
            raise ValueError(
                f"w13 is {tuple(self.w13.shape)}, w2 {tuple(self.w2.shape)}: must be [E, 2I or I, H/2] and [E, H, I/2]"
            )
        num_experts, hidden, intermediate = self.num_experts, self.hidden, self.intermediate
        block = self.format.columns[1].hidden_per_element
        if hidden % block or intermediate % block or 0 in (hidden, intermediate):
            raise ValueError(f"hidden={hidden}, intermediate={intermediate}: both must be multiples of {block}")
        rows = self.num_matrices * intermediate
        shapes: dict[str, tuple[int, ...]] = {
            "w13": (num_experts, rows, hidden // 2),
            "w13_scales": (num_experts, rows, hidden // block),
            "w13_global": (num_experts,),
            "w2": (num_experts, hidden, intermediate // 2),
            "w2_scales": (num_experts, hidden, intermediate // block),
            "w2_global": (num_experts,),
            "b13": (num_experts, rows),
            "b2": (num_experts, hidden),
        }
        for name, tensor in self.tensors().items():
            if tensor.shape != shapes[name]:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)}: must be {shapes[name]} for {num_experts} experts, "
                    f"hidden={hidden}, intermediate={intermediate} and {self.num_matrices} matrices in w13 "
                    f"({intermediate} rows = 1, {2 * intermediate} = 2)"
                )

    def _dtypes(self) -> dict[str, tuple[torch.dtype | None, ...]]:
        """The legal dtypes of each tensor; None where it may be missing."""
        codes, scales = self.format.columns
        matrix = (codes.dtype,), (scales.dtype,), (torch.float32 if self.format.row_scale else None,)
        bias = (torch.float32, torch.bfloat16, None)
        names = ("w13", "w13_scales", "w13_global", "w2", "w2_scales", "w2_global")
        return dict(zip(names, matrix * 2)) | {"b13": bias, "b2": bias}

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
    def num_matrices(self) -> int:
        """2 where w13 holds gate and up, 1 where it holds one matrix."""
        return 1 if self.w13.shape[1] == self.intermediate else 2

    @property
    def device(self) -> torch.device:
        """Where all tensors lie."""
        return self.w13.device

    @property
    def bytes(self) -> int:
        """Memory of all tensors."""
        return sum(t.numel() * t.dtype.itemsize for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by field name; the first dimension of each is the expert."""
        found = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}

    @classmethod
    def quantize(
        cls,
        w13: Tensor,
        w2: Tensor,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        format: Format = NVFP4,
        gate_order: GateOrder = GateOrder.GATE_FIRST,
    ) -> ExpertWeights:
        """Encode float weights; NVFP4's global scale of an expert's matrix is its largest magnitude / 2688. Local.

        w13         [E, 2I, H] bfloat16, float16 or float32, rows in `gate_order`; or [E, I, H]
        w2          [E, H, I]
        b13, b2     [E, 2I or I], [E, H] float32 or bfloat16, kept as they are
        format      NVFP4 or MXFP4

        Raises TypeError for another dtype, ValueError for shapes that do not fit or values that are not finite.
        """
        if w13.dim() != 3 or w2.dim() != 3 or w13.shape[1] not in (w2.shape[2], 2 * w2.shape[2]):
            raise ValueError(f"w13 is {tuple(w13.shape)}, w2 {tuple(w2.shape)}: must be [E, 2I or I, H] and [E, H, I]")
        if format not in WEIGHT_FORMATS:
            raise ValueError(_unknown(format))
        matrices = *_encode("w13", w13, format), *_encode("w2", w2, format)
        return cls(*matrices, b13, b2, format=format, gate_order=gate_order)

    def decoded(self, expert: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The fp32 weights and biases of one local expert, 0 to num_experts - 1: (w13 [R, H], w2 [H, I], b13 [R],
        b2 [H]), gate rows first whatever their order, zeros for a bias that is not there. Local.

        Raises IndexError for an expert that is not here.
        """
        if not 0 <= expert < self.num_experts:
            raise IndexError(f"expert {expert}: this rank holds local experts 0 to {self.num_experts - 1}")
        matrices = (self.w13, self.w13_scales, self.w13_global), (self.w2, self.w2_scales, self.w2_global)
        w13, w2 = (decode_format([t[expert] for t in m if t is not None], self.format) for m in matrices)
        b13 = w13.new_zeros(w13.shape[0]) if self.b13 is None else self.b13[expert].float()
        b2 = w2.new_zeros(w2.shape[0]) if self.b2 is None else self.b2[expert].float()
        if self.num_matrices == 2:
            w13, b13 = self.gate_order.gate_first(w13), self.gate_order.gate_first(b13)
        return w13, w2, b13, b2

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all tensors, under their field names, and the gate order, to a safetensors file.

        Raises ImportError without safetensors.
        """
        metadata = {"format": self.format.name, "gate_order": self.gate_order.name}
        tensors = {name: t.contiguous() for name, t in self.tensors().items()}
        _safetensors("safetensors.torch").save_file(tensors, os.fspath(path), metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str = "cpu") -> ExpertWeights:
        """Read what `save` wrote; where the file says nothing, NVFP4 and gate rows first.

        Raises ImportError without safetensors, ValueError where a tensor is missing or the file says what is not known.
        """
        with _safetensors("safetensors").safe_open(os.fspath(path), framework="pt", device=device) as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            stored = file.keys()
            found = {name: file.get_tensor(name) for name in stored}
        format_name, order = metadata.get("format", "NVFP4"), metadata.get("gate_order", "GATE_FIRST")
        formats = {f.name: f for f in WEIGHT_FORMATS}
        if format_name not in formats or order not in GateOrder.__members__:
            raise ValueError(
                f"{os.fspath(path)}: format {format_name}, gate_order {order}; known are {', '.join(formats)} and "
                f"{', '.join(GateOrder.__members__)}"
            )
        names = {spec.name for spec in fields(cls)} - {"format", "gate_order"}
        suffixes = ("", "_scales", "_global") if formats[format_name].row_scale else ("", "_scales")
        missing = [name for name in (m + suffix for m in ("w13", "w2") for suffix in suffixes) if name not in found]
        if missing:
            raise ValueError(f"{os.fspath(path)} lacks {', '.join(missing)}; it holds {', '.join(sorted(found))}")
        tensors = {name: tensor for name, tensor in found.items() if name in names}
        return cls(
            **({"w13_global": None, "w2_global": None} | tensors),
            format=formats[format_name],
            gate_order=GateOrder[order],
        )


def _unknown(format: Format) -> str:
    return f"format={format!r}: must be one of {', '.join(f.name for f in WEIGHT_FORMATS)}"


def _encode(name: str, w: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    """Encode [E, rows, columns], one expert at a time; NVFP4 with one global scale for each expert."""
    num_experts, num_rows, num_columns = w.shape
    packed, scales = (
        torch.empty(num_experts, num_rows, num_columns // c.hidden_per_element, dtype=c.dtype, device=w.device)
        for c in format.columns
    )
    global_scale = torch.ones(num_experts, dtype=torch.float32, device=w.device)
    for expert in range(num_experts):
        bad = int((~w[expert].isfinite()).sum())
        if bad:
            raise ValueError(f"{name}, expert {expert}: {bad} of {num_rows * num_columns} weights are not finite")
        if format.row_scale:
            amax = w[expert].float().abs().amax()
            if amax > 0:
                limit = torch.full_like(amax, E2M1_MAX * E4M3_MAX)
                global_scale[expert] = (amax / limit).clamp(min=MIN_GLOBAL_SCALE)
            packed[expert], scales[expert], _ = encode_nvfp4(w[expert], global_scale[expert])
        else:
            packed[expert], scales[expert] = encode_format(w[expert], format)
    return packed, scales, global_scale if format.row_scale else None


def _safetensors(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError("weights are saved and loaded with safetensors: pip install safetensors") from error
