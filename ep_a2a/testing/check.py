"""Comparisons that name what differs: the row, the column, what was wanted and what came."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_same_bits(got: Tensor, wanted: Tensor, name: str = "tensor") -> None:
    """Raise AssertionError unless dtype, shape and every bit are equal; -0 and 0 differ, NaNs of other bits too."""
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        raise AssertionError(f"{name}: got {got.dtype} {tuple(got.shape)}, wanted {wanted.dtype} {tuple(wanted.shape)}")
    if got.numel() == 0:
        return
    num_bytes = got.dtype.itemsize
    got_bits, wanted_bits = (
        t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).reshape(*t.shape, num_bytes) for t in (got, wanted)
    )
    _raise_first((got_bits != wanted_bits).any(dim=-1), got, wanted, name, None)


def assert_within(got: Tensor, reference: Tensor, bound: Tensor, name: str = "out") -> None:
    """Raise AssertionError unless |got - reference| <= bound in every element, and NaN exactly where it is wanted.

    got        [..., H] any float dtype
    reference  [..., H] float64, as `bound`; broadcasting is refused
    """
    if not got.shape == reference.shape == bound.shape:
        raise AssertionError(
            f"{name}: got {tuple(got.shape)}, reference {tuple(reference.shape)}, bound {tuple(bound.shape)}"
        )
    value = got.detach().cpu().double()
    near = (value - reference).abs() <= bound  # False wherever a NaN takes part
    _raise_first(~(near | (value.isnan() & reference.isnan())), got, reference, name, bound)


def _raise_first(wrong: Tensor, got: Tensor, wanted: Tensor, name: str, bound: Tensor | None) -> None:
    if not wrong.any():
        return
    place = tuple(wrong.nonzero()[0].tolist())
    allowed = "" if bound is None else f" within {bound[place].item():.3g}"
    raise AssertionError(
        f"{name}{list(place)}: wanted {wanted[place].item()!r}{allowed}, got {got[place].item()!r}; "
        f"{int(wrong.sum())} of {wrong.numel()} elements differ"
    )
