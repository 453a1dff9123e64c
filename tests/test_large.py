"""Offsets that need more than 32 bits: planes and rows of many GiB, of which a few pages are touched."""

import numpy as np
import pytest
import torch

import ep_a2a
from ep_a2a import quant, testing

CONFIG = ep_a2a.Config(
    num_experts=6, top_k=2, hidden=4096, max_tokens=2**20 - 5, payload=ep_a2a.BF16, timeout_s=30, first_timeout_s=60
)
RANKS = 3


def test_rows_and_results_past_4_gib():
    """Rank 2's rows start 16 GiB into every plane of rows, and its results as far into every outbox."""

    def run(rank):
        torch.set_num_threads(1)
        with ep_a2a.connect(CONFIG, group=rank) as a2a:
            layout = a2a.layout
            last_source = 2 * CONFIG.max_tokens
            assert layout.plane_offsets[0] + last_source * layout.planes[0].row_bytes > 3 * 2**32
            assert layout.outbox_offset + last_source * layout.outbox_row.row_bytes > 9 * 2**32
            x = [torch.randn(7, 4096, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(RANKS)]
            ids, weights = testing.ROUTINGS["uniform"](7, 6, 2, torch.Generator().manual_seed(9))
            received, handle = ep_a2a.dispatch(a2a, x[a2a.rank], ids, weights)
            here = testing.destinations(ids, 6, RANKS)[:, a2a.rank]
            outbox = a2a.outbox()
            for source in range(RANKS):
                testing.assert_same_bits(received.rows[source, :7][here], x[source][here], f"from rank {source}")
                outbox[source, :7] = x[source] * (a2a.rank + 1)
            out = ep_a2a.combine(a2a, handle)
            outboxes = [torch.stack([theirs * (r + 1) for theirs in x]) for r in range(RANKS)]
            masks = [testing.destinations(ids, 6, RANKS)] * RANKS
            testing.assert_same_bits(out, testing.reference_combine(outboxes, masks)[a2a.rank], "out")

    ep_a2a.local(RANKS).run(run)


@pytest.mark.slow
def test_the_scale_of_a_row_of_4_gib():
    row = torch.from_numpy(np.zeros((1, 2**30), dtype=np.float32))  # pages that nobody writes take no memory
    row[0, -1] = 2 * 6 * 448
    assert quant.encode(row, ep_a2a.NVFP4)[2].tolist() == [2.0]
