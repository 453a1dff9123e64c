"""Expert parallelism for Mixture-of-Experts layers: tokens out to their experts, through them, and back.

A tour with two ranks in one process, on a CPU; the same calls serve processes that torchrun, mpirun or Slurm started.

>>> import torch, ep_a2a
>>> config = ep_a2a.Config(num_experts=4, top_k=1, hidden=32, max_tokens=8, payload=ep_a2a.BF16, timeout_s=10)
>>> def layer(rank):
...     with ep_a2a.connect(config, group=rank) as a2a:
...         x = torch.full((2, 32), float(rank.rank + 1)).bfloat16()  # two tokens, all of them 1 or 2
...         ids = torch.tensor([[0], [3]], dtype=torch.int32)  # the first to expert 0, the second to expert 3
...         received, handle = ep_a2a.dispatch(a2a, x, ids, torch.ones(2, 1))
...         a2a.outbox()[received.valid] = 10 * received.rows[received.valid]  # an "expert" that multiplies by ten
...         return ep_a2a.combine(a2a, handle)[:, 0].tolist()
>>> ep_a2a.local(num_ranks=2).run(layer)
[[10.0, 10.0], [20.0, 20.0]]

`Config` decides shapes, formats and deadlines; `Config.bytes` tells what it will cost. `dispatch` gives views of the
received rows and a handle, `combine` or `release` ends the round. `dispatch_begin(...)` and later `.wait()` overlap a
round with other work. `received.compact()` and `received.by_expert(n)` group rows for expert kernels of your own, and
`combine(..., order=...)` takes their results. `MoELayer` joins the three steps; `ep_a2a.testing` has the slow
reference of each.
"""

from ep_a2a.api import (
    A2A,
    Handle,
    Order,
    Pairs,
    PendingCombine,
    PendingDispatch,
    PendingRelease,
    Ranks,
    Received,
    Watch,
    combine,
    combine_begin,
    connect,
    dispatch,
    dispatch_begin,
    release,
    release_begin,
    reserve,
)
from ep_a2a.config import Config, Sizes
from ep_a2a.device import set_device
from ep_a2a.errors import (
    CapacityExceeded,
    ChannelMisuse,
    ClosedError,
    ConfigMismatch,
    EpError,
    InvalidCount,
    InvalidRouting,
    PeerLeft,
    PeerTimeout,
    RendezvousTimeout,
    RoundError,
    RoundMismatch,
    StickyError,
    SymmetricMemoryError,
)
from ep_a2a.layout import BF16, FP8, FP16, FP32, MXFP4, MXFP8, NVFP4, Format, phased_split
from ep_a2a.lockstep import LockstepWorld, local
from ep_a2a.world import LocalRank, LocalWorld

__version__ = "0.1.0"

__all__ = [
    "A2A",
    "BF16",
    "FP8",
    "FP16",
    "FP32",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "CapacityExceeded",
    "ChannelMisuse",
    "ClosedError",
    "Config",
    "ConfigMismatch",
    "EpError",
    "Format",
    "Handle",
    "InvalidCount",
    "InvalidRouting",
    "LocalRank",
    "LocalWorld",
    "LockstepWorld",
    "Order",
    "Pairs",
    "PeerLeft",
    "PeerTimeout",
    "PendingCombine",
    "PendingDispatch",
    "PendingRelease",
    "Ranks",
    "Received",
    "RendezvousTimeout",
    "RoundError",
    "RoundMismatch",
    "Sizes",
    "StickyError",
    "SymmetricMemoryError",
    "Watch",
    "combine",
    "combine_begin",
    "connect",
    "dispatch",
    "dispatch_begin",
    "local",
    "phased_split",
    "release",
    "release_begin",
    "reserve",
    "set_device",
]
