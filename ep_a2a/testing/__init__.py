"""Slow, plain references, routings and tolerances, for the tests of this library and of its users. No kernels.

encode_nvfp4, decode_nvfp4              the definition of the format, bit for bit
ROUTINGS                                generators of ids and weights: uniform, Zipf, holes, duplicates, ...
"""

from ep_a2a.testing.nvfp4 import decode_nvfp4, encode_nvfp4
from ep_a2a.testing.routing import ROUTINGS, Routing

__all__ = ["ROUTINGS", "Routing", "decode_nvfp4", "encode_nvfp4"]
