"""A channel's guards: the device's, of a round that the host's checks cannot see, and the host's, of its own state."""

import itertools
import sys

import pytest
import torch

import ep_a2a
from ep_a2a import abi
from ep_a2a.channel import Channel, Stage

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


# ---- a signal's exception ----------------------------------------------------------------------------------------

BF16_CONFIG = ep_a2a.Config(num_experts=4, top_k=1, hidden=64, max_tokens=64, payload=ep_a2a.BF16, timeout_s=20)


def inputs(value, rows=4, offset=0):
    """x, ids and weights of a dispatch, from the `offset`-th element of a storage on."""
    made = []
    for width, dtype, fill in ((64, torch.bfloat16, value), (1, torch.int32, 0), (1, torch.float32, 1)):
        made.append(torch.full((rows * width + offset,), fill, dtype=dtype)[offset:].view(rows, width))
    return made


def is_stopped_at(line, call):
    """Run `call` until the `line`-th line of those that set up a launch, where a signal's exception comes."""
    codes = {getattr(Channel, name).__code__ for name in ("send", "_place", "_align", "_use")}
    lines = itertools.count()

    def trace(frame, event, _):
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(lambda frame, event, _: trace if frame.f_code in codes else None)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize(
    ("schedule", "first", "second"),
    [
        ("phased", inputs(1), inputs(2)),
        ("phased", inputs(1), inputs(2, offset=1)),
        ("phased", inputs(1, offset=1), inputs(2)),
        ("phased", inputs(1), inputs(2, rows=33)),
        ("general", inputs(1), inputs(2)),
    ],
    ids=["addresses", "less aligned", "more aligned", "rows", "schedule"],
)
def test_an_exception_between_any_two_lines_before_a_launch_leaves_the_next_one_right(schedule, first, second):
    line, num_unsent, stopped = 0, 0, True
    while stopped:
        with ep_a2a.connect(BF16_CONFIG, ep_a2a.local(1)) as (a2a,):
            a2a.schedule = schedule
            ep_a2a.release(a2a, ep_a2a.dispatch(a2a, *first)[1])
            a2a.schedule = "phased"
            stopped = is_stopped_at(line, lambda: ep_a2a.dispatch(a2a, *second))
            if stopped and a2a._channels[0].stage is Stage.CLOSED:
                num_unsent += 1
                for x, ids, weights in (first, second, first):
                    received, handle = ep_a2a.dispatch(a2a, x, ids, weights)
                    assert received.num_tokens.tolist() == [len(x)]
                    assert torch.equal(received.rows[0, : len(x)], x) and received.valid.sum() == len(x)
                    ep_a2a.release(a2a, handle)
                    sources = a2a._channels[0]._sources
                    assert all(source.rows % source.align_bytes == 0 for source in sources), "a CPU would forgive it"
        line += 1
    assert num_unsent > 10
