"""Slow, plain references, routings and tolerances, for the tests of this library and of its users. No kernels.

encode_nvfp4, decode_nvfp4           the definition of the format, bit for bit
encode_format, decode_format         the same of every payload format
coding_error                         how far a decoded value can be from the one that was encoded
payload_planes, decode_planes        rows to the planes of a configuration's payload, and back to values
destinations                         to which ranks a token goes
reference_dispatch                   what a rank must hold after dispatch
reference_combine                    what combine must return, bit for bit
reference_compact, reference_by_expert  the pairs of received rows and experts, in slots
reference_ordered_outbox             what combine makes of the rows of such pairs, bit for bit
reference_moe                        a whole layer in float64, with two error bounds
reference_part, reference_sum        the same, made by several processes
assert_same_bits, assert_within      comparisons that name the first element that differs
ROUTINGS                             generators of ids and weights: uniform, Zipf, holes, duplicates, ...
"""

from ep_a2a.testing.check import assert_same_bits, assert_within
from ep_a2a.testing.exchange import (
    Expected,
    decode_planes,
    destinations,
    payload_planes,
    reference_combine,
    reference_dispatch,
)
from ep_a2a.testing.formats import coding_error, decode_format, encode_format
from ep_a2a.testing.moe import MoEPart, MoEReference, reference_moe, reference_part, reference_sum
from ep_a2a.testing.nvfp4 import decode_nvfp4, encode_nvfp4
from ep_a2a.testing.route import ExpectedPairs, reference_by_expert, reference_compact, reference_ordered_outbox
from ep_a2a.testing.routing import ROUTINGS, Routing

__all__ = [
    "ROUTINGS",
    "Expected",
    "ExpectedPairs",
    "MoEPart",
    "MoEReference",
    "Routing",
    "assert_same_bits",
    "assert_within",
    "coding_error",
    "decode_format",
    "decode_nvfp4",
    "decode_planes",
    "destinations",
    "encode_format",
    "encode_nvfp4",
    "payload_planes",
    "reference_by_expert",
    "reference_combine",
    "reference_compact",
    "reference_dispatch",
    "reference_moe",
    "reference_ordered_outbox",
    "reference_part",
    "reference_sum",
]
