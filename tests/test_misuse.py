"""The device's own guard of a channel: a round that the host's checks cannot see, as in a replayed graph."""

import pytest
import torch

import ep_a2a
from ep_a2a import abi

RANKS = 5
CONFIG = ep_a2a.Config(num_experts=8, top_k=2, hidden=32, max_tokens=4, timeout_s=20, first_timeout_s=20)


def send_again(a2a):
    """A second dispatch on the open channel, past the host's checks."""
    channel = a2a._channels[0]
    channel._library.dispatch_send(channel._dispatch, 0)


def end_closed(a2a):
    """The end of a round on a channel that is closed, past the host's checks."""
    channel = a2a._channels[0]
    params = channel._wait[abi.PHASE_COMBINE]
    params.signals, params.waits = 1, 0
    channel._library.end(params, 0)


def one_round(a2a):
    ids = torch.zeros(3, 2, dtype=torch.int32)
    return ep_a2a.dispatch(a2a, torch.ones(3, 32), ids, torch.ones(3, 2))


@pytest.mark.parametrize(
    ("misuse", "open_first", "what"),
    [(send_again, True, "dispatched on an open channel"), (end_closed, False, "ended a round that is not open")],
)
def test_misuse_ends_the_channel_on_every_rank(misuse, open_first, what):
    """Rank 1 misuses its channel; it and all peers raise ChannelMisuse naming it, long before their deadline."""

    def run(rank):
        a2a = ep_a2a.connect(CONFIG, group=rank)
        _, handle = one_round(a2a)
        if not open_first:
            ep_a2a.release(a2a, handle)
        rank.barrier("all are here", 20)
        if rank.rank == 1:
            misuse(a2a)
        rank.barrier("misused", 20)
        words = [int(word) for word in abort_words(a2a)]
        rank.barrier("looked", 20)
        proceed = (lambda: ep_a2a.combine(a2a, handle)) if open_first else (lambda: one_round(a2a))
        with pytest.raises(ep_a2a.ChannelMisuse) as raised:
            proceed()
        with pytest.raises(ep_a2a.ChannelMisuse):
            a2a.check()
        a2a.close()
        return words, str(raised.value)

    found = ep_a2a.local(RANKS).run(run)
    for rank, (words, text) in enumerate(found):
        assert [source for source, word in enumerate(words) if word] == [1], "one abort word, at every peer"
        assert what in text
        assert ("this rank" if rank == 1 else "peer 1") in text


def abort_words(a2a):
    """This rank's abort words, by source."""
    start = a2a.layout.abort_words_offset
    return a2a._memory.region[start : start + 8 * a2a.num_ranks].clone().view(torch.int64)
