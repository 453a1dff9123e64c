"""Every error that is this library's own, in one place.

`ValueError` and `TypeError` are used for a wrong argument; the classes below say what happened between ranks.
Two groups matter to a caller: after a *sticky* one the object can only be closed, after any other it goes on.
"""

from __future__ import annotations


class EpError(RuntimeError):
    """Base class of the errors of this library."""


class StickyError(EpError):
    """The object is out of step with its peers for ever: every call but `close()` raises this again."""


class PeerTimeout(StickyError):
    """A peer is later than the deadline allows, or the peers gave up on this rank."""


class PeerLeft(StickyError):
    """A peer left its `with` block by an exception, or this rank did: look at that rank's own output."""


class ChannelMisuse(StickyError):
    """The device found a channel open that had to be closed, or the other way round."""


class RoundMismatch(StickyError):
    """One rank ended a round with combine, another with release."""


class InvalidRouting(EpError):
    """A token asked for an expert that does not exist; it was not routed there, all else was delivered."""


class InvalidCount(EpError):
    """The token count on the device was outside [0, T]; it was clamped."""


class CapacityExceeded(EpError):
    """More pairs of rows and experts came than `compact` or `by_expert` had slots for; the others were dropped."""


class ConfigMismatch(EpError):
    """Ranks called `connect` with configurations that differ."""


class RendezvousTimeout(EpError):
    """A rank did not arrive at a collective host call (connect, close) before the deadline."""


class SymmetricMemoryError(EpError):
    """Symmetric memory could not be had: too little, or the ranks cannot reach each other."""


class RoundError(EpError):
    """A call that does not fit the state of its channel; nothing was launched and the object goes on."""


class ClosedError(EpError):
    """The object was closed."""
